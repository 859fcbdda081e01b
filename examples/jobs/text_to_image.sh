accelerate launch --mixed_precision fp16 train_text_to_image_lora.py \
    --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \
    --dataset_name lambdalabs/naruto-blip-captions \
    --resolution 512 --train_batch_size 16 \
    --rank 16 --learning_rate 1e-4 --output_dir out
