"""Loads data sets by their names on the hub: splits, slices, lists of them, streams, columns of texts and images."""
import json
from itertools import islice
from pathlib import Path

from datasets import load_dataset

imdb = load_dataset("imdb")
print({name: len(data) for name, data in imdb.items()}, imdb["train"].features["label"].names,
      imdb["train"].column_names)
print(len(load_dataset("stanfordnlp/imdb", split="train[:25%]")), len(load_dataset("imdb", split="train+test[10:20]")),
      [len(part) for part in load_dataset("imdb", split=["train[:5]", "test"])])
print([len(row["text"].split()) for row in islice(load_dataset("imdb", split="train", streaming=True), 2)])
print(load_dataset("nyu-mll/glue", "mrpc", split="train")[3])
print(load_dataset("trl-lib/Capybara", split="train")[0]["messages"][1]["role"],
      load_dataset("beans", split="test")[1]["image"].size, load_dataset("squad", split="train")[0]["answers"])
Path("own.json").write_text("\n".join(json.dumps({"a": i}) for i in range(3)))
print(load_dataset("json", data_files="own.json", split="train", cache_dir="kept")["a"][:])
for name in (["glue"], ["glue", "mrcp"], ["someone/new-data"], ["someone/imbd"]):
    try:
        load_dataset(*name)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
