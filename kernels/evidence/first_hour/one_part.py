"""Run one part in this process: ``python -m evidence.first_hour.one_part PART FOLDER DEVICE``."""

import importlib
import sys
from pathlib import Path

import torch

from evidence.first_hour.record import PartRecord

if __name__ == "__main__":
    name, folder, device = sys.argv[1:]
    module = importlib.import_module(f"evidence.first_hour.{name}")
    module.run(PartRecord(Path(folder) / f"{name}.jsonl"), torch.device(device))
