"""Parts of ``scripts/train_nano.py``: tokenizer, synthetic data, training model, training phases, evaluation, checkpoint files."""

from __future__ import annotations
