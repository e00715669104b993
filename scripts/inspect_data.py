"""What is in a prepared folder: files, tokens, documents and their lengths, a decoded sample, and the manifest's word.

python scripts/inspect_data.py path=data/shards/sotu_gpt2
python scripts/inspect_data.py path=data/shards/fineweb10b sha256=true samples=3 plot=true
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

import pandas as pd
from tqdm import tqdm

from configs.command import command
from data.documents import Bin, Documents, count_documents, draw_samples, histogram, median
from data.loader import TokenStream, open_split
from data.manifest import MANIFEST, REMEDY, read_manifest, verify
from data.tokenizer import Tokenizer, load_tokenizer

SPLITS = ("train", "val")
BAR_WIDTH = 40


@command("inspect_data")
def main(config: Any) -> None:
    for key, least in (("samples", 0), ("sample_tokens", 1), ("seed", 0)):
        if config[key] < least:
            raise ValueError(f"{key}={config[key]} must be at least {least}")
    folder = Path(config.path)
    check_folder(folder)
    manifest = read_manifest(folder)
    tokenizer = load_tokenizer(tokenizer_name(folder, config.tokenizer, manifest))
    streams = {  # open_split compares the sizes with the manifest
        split: TokenStream(open_split(folder, split).paths, tokenizer.vocab_size)
        for split in SPLITS
        if split_files(folder, split)
    }
    found = count_all(streams, tokenizer)
    compared = compare(folder, manifest, found, config.sha256)
    lengths = sum((documents.lengths for documents in found.values()), Counter())

    source = "" if manifest is None else f"source={manifest.get('source')}, "
    print(f"{folder}: {source}tokenizer={tokenizer.name} ({tokenizer.vocab_size:,} ids)\n")
    print(table(streams, found), f"\n{compared}\n", text_histogram(histogram(lengths)), sep="\n")
    split = next(iter(streams))
    samples = draw_samples(streams[split], found[split], tokenizer, config.samples, config.sample_tokens, config.seed)
    for sample in samples:
        print(f"\n--- {split}, the document that starts at token {sample.position:,}:\n{sample.text}")
    if config.plot:
        plot(histogram(lengths), folder, config.out)


def check_folder(folder: Path) -> None:
    """Raises FileNotFoundError or ValueError, naming the key, unless there are shards to look at."""
    if folder.is_file():
        raise ValueError(f"path={folder} is a file; give the folder that it is in")
    if not folder.is_dir():
        raise FileNotFoundError(f"path={folder}: no such folder; scripts/prepare_data.py makes one")
    if not any(split_files(folder, split) for split in SPLITS):
        raise FileNotFoundError(f"path={folder}: no *_train_*.bin and no *_val_*.bin in it; give a prepared folder")


def split_files(folder: Path, split: str) -> list[Path]:
    return list(folder.glob(f"*_{split}_*.bin"))


def tokenizer_name(folder: Path, given: str | None, manifest: dict[str, Any] | None) -> str:
    """What the manifest says, or the user where there is none. Raises ValueError if nobody says, or both differ."""
    written = manifest and manifest.get("tokenizer")
    if given is None and written is None:
        raise ValueError(f"path={folder}: no {MANIFEST} says which tokenizer made it; set tokenizer=gpt2 or bytes")
    if None not in (given, written) and given != written:
        raise ValueError(f"tokenizer={given}, but {folder / MANIFEST} says {written}; leave tokenizer out")
    return str(given or written)


def count_all(streams: dict[str, TokenStream], tokenizer: Tokenizer) -> dict[str, Documents]:
    total = sum(len(stream) for stream in streams.values())
    with tqdm(total=total, unit="tok", unit_scale=True, desc="reading", disable=None) as bar:
        return {split: count_documents(stream, tokenizer.end_of_text, bar) for split, stream in streams.items()}


def compare(folder: Path, manifest: dict[str, Any] | None, found: dict[str, Documents], contents: bool) -> str:
    """Compares documents (and contents) with the manifest; says what agrees. Raises ValueError naming a file if not."""
    if manifest is None:
        if contents:
            raise ValueError(f"sha256=true: {folder} has no {MANIFEST} to compare with; leave sha256 out")
        return f"no {MANIFEST} to compare with"
    files = manifest["files"]
    counted = {name: count for documents in found.values() for name, count in documents.by_file.items()}
    for entry in files:
        said = entry.get("documents", counted.get(entry["name"]))
        if said != counted.get(entry["name"]):
            raise ValueError(
                f"{folder / entry['name']}: {counted.get(entry['name'])} documents start in it, but {MANIFEST} says "
                f"{said}; {REMEDY}"
            )
    if not contents:
        return f"{MANIFEST}: {len(files)} files, sizes, tokens and documents agree (sha256=true compares contents, too)"
    for name, fault in verify(folder).items():
        raise ValueError(f"{folder / name}: {fault}; {REMEDY}")
    return f"{MANIFEST}: {len(files)} files, sizes, tokens, documents and SHA-256 agree"


def table(streams: dict[str, TokenStream], found: dict[str, Documents]) -> str:
    """One line a split; lengths in tokens, the end-of-text token included."""
    rows = {}
    for split, documents in found.items():
        lengths, paths = documents.lengths, streams[split].paths
        rows[split] = {
            "files": len(paths),
            "tokens": documents.tokens,
            "bytes": sum(path.stat().st_size for path in paths),
            "largest id": documents.largest_id,
            "documents": lengths.total(),
        }
        if lengths:
            mean = (documents.tokens - documents.headless_tokens) / lengths.total()
            rows[split] |= {"shortest": min(lengths), "median": median(lengths), "mean": round(mean)}
            rows[split] |= {"longest": max(lengths)}
    frame = pd.DataFrame.from_dict(rows, orient="index", dtype=object)
    lines = [frame.map(lambda x: "-" if pd.isna(x) else f"{x:,}").to_string()]
    lines += [
        f"{split} begins with {documents.headless_tokens:,} tokens of a document that starts elsewhere"
        for split, documents in found.items()
        if documents.headless_tokens
    ]
    return "\n".join(lines)


def text_histogram(bins: list[Bin]) -> str:
    if not bins:
        return "no document starts in it"
    documents, tokens = sum(entry.documents for entry in bins), sum(entry.tokens for entry in bins)
    most = max(entry.documents for entry in bins)
    lines = [f"{'length in tokens':>27}{'documents':>13}{'':9}{'of the tokens':>14}"]
    for low, count, held in bins:
        bar = "#" * -(-BAR_WIDTH * count // most)  # rounded up, so that few are not none
        span = f"{low:,} to {2 * low - 1:,}" if low > 1 else "1"
        lines.append(f"{span:>27}{count:13,}{count / documents:9.1%}{held / tokens:14.1%}  {bar}".rstrip())
    return "\n".join(lines)


def plot(bins: list[Bin], folder: Path, out: str | None) -> None:
    from eval.documents import length_figure  # here, because matplotlib takes its time
    from eval.figures import save_figure

    if not bins:
        raise ValueError(f"plot=true: no document starts in {folder}; leave plot out")
    stem = Path(out or f"results/data/{folder.resolve().name}.png").with_suffix("")
    print("", *save_figure(length_figure(bins, folder.resolve().name), stem), sep="\n")


if __name__ == "__main__":
    main()
