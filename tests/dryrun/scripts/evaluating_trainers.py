"""A classifier trained by the Trainer of Lightning or of transformers, with evaluation after each second step."""
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return {"x": torch.zeros(256), "labels": index % 8}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))

    def forward(self, x, labels=None):
        out = self.model(x)
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


def run_lightning():
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Classifier()

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def validation_step(self, batch, index):
            self.log("loss", self.net(**batch)["loss"])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = L.Trainer(max_steps=10, accelerator="gpu", devices=1, val_check_interval=2, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Module(), DataLoader(Data(), 64), DataLoader(Data(), 128))


def run_transformers():
    from transformers import Trainer, TrainingArguments

    settings = TrainingArguments("out", per_device_train_batch_size=64, per_device_eval_batch_size=128, max_steps=10,
                                 eval_strategy="steps", eval_steps=2, save_strategy="no", report_to=[])
    trainer = Trainer(Classifier(), settings, train_dataset=Data(), eval_dataset=Data(),
                      compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())})
    trainer.train()


{"lightning": run_lightning, "transformers": run_transformers}[sys.argv[1]]()
