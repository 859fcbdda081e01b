"""timm's training loop: mixup, an EMA, a scaler, channels_last."""
from functools import partial

import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler, accuracy
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda")
torch.backends.cudnn.benchmark = True
model = create_model("resnet18", pretrained=False, num_classes=10, drop_rate=0.1)
model = model.to(device=device, memory_format=torch.channels_last)
optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9, weight_decay=1e-4)
ema = ModelEmaV3(model, decay=0.9998, use_warmup=True)
scaler = NativeScaler(device=device.type)
autocast = partial(torch.autocast, device_type=device.type, dtype=torch.float16)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10, label_smoothing=0.1)
loss_fn = SoftTargetCrossEntropy().to(device)
scheduler = CosineLRScheduler(optimizer, t_initial=100, warmup_t=5)
loader = DataLoader(TensorDataset(torch.randn(512, 3, 64, 64), torch.randint(10, (512,))), 32, shuffle=True,
                    num_workers=4, pin_memory=True, drop_last=True)
losses, updates = AverageMeter(), 0
for _epoch in range(2):
    model.train()
    for input, target in loader:
        input, target = input.to(device, non_blocking=True), target.to(device, non_blocking=True)
        input, target = mixup(input, target)
        input = input.contiguous(memory_format=torch.channels_last)
        with autocast():
            output = model(input)
            loss = loss_fn(output, target)
        scaler(loss, optimizer, clip_grad=1.0, clip_mode="norm", parameters=model.parameters(), need_update=True)
        optimizer.zero_grad()
        updates += 1
        ema.update(model, step=updates)
        torch.cuda.synchronize()
        losses.update(loss.item(), input.size(0))
        print(f"{losses.val:.3f} ({losses.avg:.3f}) lr {optimizer.param_groups[0]['lr']}")
        scheduler.step_update(num_updates=updates, metric=losses.avg)
    model.eval()
    with torch.no_grad():
        for input, target in loader:
            output = model(input.to(device))
            acc1, acc5 = accuracy(output, target.to(device), topk=(1, 5))
            print(acc1.item())
