"""The models whose memory is compared with this host's: names of the coverage benchmark, small enough to run."""
from __future__ import annotations

import itertools

_NAMES = """
torchvision:squeezenet1_1 torchvision:shufflenet_v2_x0_5 torchvision:mobilenet_v3_small torchvision:mnasnet0_5
torchvision:resnet18 torchvision:mobilenet_v2 torchvision:lraspp_mobilenet_v3_large torchvision:regnet_y_400mf
torchvision:efficientnet_b0 torchvision:densenet121 torchvision:googlenet torchvision:raft_small

timm:test_vit timm:test_resnet timm:test_efficientnet timm:test_convnext timm:test_byobnet timm:test_nfnet
timm:test_mambaout timm:test_vit2 timm:test_efficientnet_gn timm:test_maxvit timm:test_vit3 timm:test_coatnet
timm:test_convnext2 timm:test_efficientnet_ln timm:test_vit4 timm:test_convnext3 timm:test_efficientnet_evos
timm:test_vit_relpos timm:lcnet_050 timm:resnet10t timm:tinynet_e timm:vit_tiny_patch16_224 timm:edgenext_xx_small
timm:regnetx_002 timm:mobilevit_xxs timm:pvt_v2_b0 timm:convnextv2_atto timm:ghostnet_050 timm:deit_tiny_patch16_224
timm:levit_128s timm:gmlp_ti16_224 timm:xcit_nano_12_p8_224 timm:repvit_m0_9 timm:coat_tiny

transformers:AlbertForMaskedLM transformers:BartForConditionalGeneration transformers:BertForMaskedLM
transformers:BloomForCausalLM transformers:CLIPModel transformers:DebertaV2ForTokenClassification
transformers:DistilBertForMaskedLM transformers:ElectraForPreTraining transformers:GPT2LMHeadModel
transformers:GPTNeoXForCausalLM transformers:Gemma2ForCausalLM transformers:LlamaForCausalLM
transformers:LongformerForMaskedLM transformers:MambaForCausalLM transformers:MixtralForCausalLM
transformers:ModernBertForSequenceClassification transformers:MptForCausalLM transformers:OPTForCausalLM
transformers:PhiForCausalLM transformers:Qwen2ForCausalLM transformers:Qwen3MoeForCausalLM
transformers:ReformerForMaskedLM transformers:RobertaForMaskedLM transformers:RwkvForCausalLM
transformers:SegformerForSemanticSegmentation transformers:T5ForConditionalGeneration
transformers:ViTForImageClassification transformers:ViltForQuestionAnswering transformers:Wav2Vec2ForCTC
transformers:WhisperForConditionalGeneration transformers:XLNetLMHeadModel

diffusers:AutoencoderKL diffusers:ControlNetModel diffusers:DiTTransformer2DModel diffusers:PixArtTransformer2DModel
diffusers:SD3Transformer2DModel diffusers:UNet2DConditionModel diffusers:UNet2DModel diffusers:UNet3DConditionModel

torch.nn:Bilinear torch.nn:CTCLoss torch.nn:ConvTranspose2d torch.nn:CrossEntropyLoss torch.nn:EmbeddingBag
torch.nn:GRU torch.nn:GroupNorm torch.nn:InstanceNorm2d torch.nn:LSTM torch.nn:LSTMCell torch.nn:MultiheadAttention
torch.nn:RMSNorm torch.nn:RNN torch.nn:Transformer torch.nn:weight|norm
"""
_names = [name.replace("|", " ") for name in _NAMES.split()]
_families = [[n for n in _names if n.startswith(f)] for f in dict.fromkeys(n.partition(":")[0] for n in _names)]
#: families in turn, so that the first few are of all
MODELS = tuple(name for row in itertools.zip_longest(*_families) for name in row if name)
