"""torchvision's reference for detection."""
import math
import sys

import torch
import torchvision


class Boxes(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        boxes = torch.tensor([[10.0, 10.0, 60.0, 60.0], [20.0, 30.0, 90.0, 80.0]])
        return torch.rand(3, 128, 160), {"boxes": boxes, "labels": torch.tensor([1, 2]), "image_id": index}


device = torch.device("cuda")
loader = torch.utils.data.DataLoader(Boxes(), 2, shuffle=True, num_workers=2,
                                     collate_fn=lambda batch: tuple(zip(*batch)))
model = torchvision.models.detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5,
                                                             min_size=128, max_size=160).to(device)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9,
                            weight_decay=1e-4)
model.train()
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=10)
for images, targets in loader:
    images = [image.to(device) for image in images]
    targets = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
    loss = sum(model(images, targets).values())
    value = loss.item()
    if not math.isfinite(value):
        sys.exit(f"Loss is {value}, stopping training")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warmup.step()
