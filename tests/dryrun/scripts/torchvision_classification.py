"""torchvision's reference for classification: mixup by its transforms, an EMA, a scaler."""
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import default_collate
from torchvision.transforms import v2


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay, device="cpu"):
        super().__init__(model, device, lambda old, new, count: decay * old + (1 - decay) * new, use_buffers=True)


def accuracy(output, target, topk=(1,)):
    with torch.inference_mode():
        maxk = max(topk)
        if target.ndim == 2:
            target = target.max(dim=1)[1]
        _, pred = output.topk(maxk, 1, True, True)
        correct = pred.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in topk]


mix = v2.RandomChoice([v2.MixUp(num_classes=10, alpha=0.2), v2.CutMix(num_classes=10, alpha=1.0)])
train = v2.Compose([v2.RandomResizedCrop(64), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True),
                    v2.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)), v2.RandomErasing(0.1)])
data = torchvision.datasets.FakeData(256, (3, 72, 72), 10, transform=v2.Compose([v2.PILToTensor(), train]))
loader = DataLoader(data, 32, sampler=torch.utils.data.RandomSampler(data), num_workers=4, pin_memory=True,
                    collate_fn=lambda batch: mix(*default_collate(batch)))
device = torch.device("cuda")
model = torchvision.models.resnet18(weights=None, num_classes=10).to(device)
decayed, others = [], []
for module in model.modules():
    for parameter in module.parameters(recurse=False):
        (others if isinstance(module, nn.BatchNorm2d) else decayed).append(parameter)
optimizer = torch.optim.SGD([{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}],
                            lr=0.1, momentum=0.9)
scaler = torch.cuda.amp.GradScaler()
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=5),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 85)], milestones=[5])
ema = ExponentialMovingAverage(model, device=device, decay=0.99998)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
for _epoch in range(2):
    model.train()
    for image, target in loader:
        image, target = image.to(device), target.to(device)
        with torch.cuda.amp.autocast(enabled=True):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        ema.update_parameters(model)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        print(loss.item(), acc1.item(), optimizer.param_groups[0]["lr"])
    scheduler.step()
