"""The models whose memory is compared with this host's: names of the coverage benchmark, small enough to run."""
from __future__ import annotations

_NAMES = """
torchvision:densenet121 torchvision:efficientnet_b0 torchvision:googlenet torchvision:lraspp_mobilenet_v3_large
torchvision:mnasnet0_5 torchvision:mobilenet_v2 torchvision:mobilenet_v3_small torchvision:raft_small
torchvision:regnet_y_400mf torchvision:resnet18 torchvision:shufflenet_v2_x0_5 torchvision:squeezenet1_1

timm:coat_tiny timm:convnextv2_atto timm:deit_tiny_patch16_224 timm:edgenext_xx_small timm:ghostnet_050
timm:gmlp_ti16_224 timm:lcnet_050 timm:levit_128s timm:mobilevit_xxs timm:pvt_v2_b0 timm:regnetx_002 timm:repvit_m0_9
timm:resnet10t timm:test_byobnet timm:test_convnext timm:test_convnext2 timm:test_convnext3 timm:test_coatnet
timm:test_efficientnet timm:test_efficientnet_evos timm:test_efficientnet_gn timm:test_efficientnet_ln
timm:test_mambaout timm:test_maxvit timm:test_nfnet timm:test_resnet timm:test_vit timm:test_vit2 timm:test_vit3
timm:test_vit4 timm:test_vit_relpos timm:tinynet_e timm:vit_tiny_patch16_224 timm:xcit_nano_12_p8_224

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
MODELS = tuple(name.replace("|", " ") for name in _NAMES.split())
