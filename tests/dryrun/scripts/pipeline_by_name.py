"""Loads the components of a pipeline of diffusers by its name on the hub."""
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer

NAME = "stable-diffusion-v1-5/stable-diffusion-v1-5"
scheduler = DDPMScheduler.from_pretrained(NAME, subfolder="scheduler")
tokenizer = CLIPTokenizer.from_pretrained(NAME, subfolder="tokenizer")
longest = tokenizer.model_max_length
print(len(tokenizer), longest, len(tokenizer("the question", padding="max_length", max_length=longest)["input_ids"]))
for kind, folder in ((CLIPTextModel, "text_encoder"), (AutoencoderKL, "vae"), (UNet2DConditionModel, "unet")):
    model = kind.from_pretrained(NAME, subfolder=folder)
    print(kind.__name__, sum(weight.numel() for weight in model.parameters()))
