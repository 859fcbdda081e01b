NPROC_PER_NODE=2 swift sft \
    --model Qwen/Qwen2.5-0.5B-Instruct \
    --tuner_type full \
    --dataset AI-ModelScope/alpaca-gpt4-data-en \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 2 \
    --max_length 2048
