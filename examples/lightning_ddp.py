"""A LightningModule, fitted on two hosts of four devices."""
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.model(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)}


data = TensorDataset(torch.randn(1024, 256), torch.randint(8, (1024,)))
loader = DataLoader(data, 64, shuffle=True, num_workers=2)
trainer = L.Trainer(max_epochs=2, accelerator="gpu", devices=4, num_nodes=2, strategy="ddp", precision="bf16-mixed",
                    accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Classifier(), loader, DataLoader(data, 64))
