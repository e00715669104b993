"""Text from a trained run: python scripts/generate.py run_dir=runs/NAME prompt="Fellow citizens" max_new_tokens=100

Prints each prompt and its continuation, the continuation of a single prompt as it comes.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

from configs.command import command
from configs.schema import check_choices
from eval.generate import Sampling, StopAt, generate, run_tokenizer
from eval.memory import check_memory
from eval.runs import load_run
from training.distributed import start_process


@command("generate")
def main(config: Any) -> None:
    check_choices(config)
    texts = read_prompts(config)
    sampling = Sampling(config.temperature, config.top_k, config.top_p, config.seed)
    with start_process(config.device, config.precision) as process:
        model, trained = load_run(config.run_dir, process.device, config.step)
        tokenizer = run_tokenizer(trained, config.tokenizer)
        stop = StopAt(tokenizer, config.stop)
        start = [tokenizer.end_of_text] if config.start_of_document else []
        prompts = [start + tokenizer.encode(text).tolist() for text in texts]
        longest = max(map(len, prompts)) + max(config.max_new_tokens, 0)
        remedy = "ask for fewer tokens or prompts, or a lower prefill_tokens"
        check_memory(model, len(prompts), longest, config.prefill_tokens, process.precision, remedy)
        printer = Printer(texts[0], stop) if len(texts) == 1 else None
        new = generate(
            model,
            prompts,
            config.max_new_tokens,
            sampling,
            done=printer if printer else stop,
            inference_length=config.inference_length,
            vocab_size=min(tokenizer.vocab_size, model.config.vocab_size),
            prefill_tokens=config.prefill_tokens,
            autocast=process.autocast,
        )
        if printer:
            printer.finish(new[0])
            return
        for text, tokens in zip(texts, new, strict=True):
            print(text + stop.text(tokens))


def read_prompts(config: Any) -> list[str]:
    """The prompt, or the lines of prompts_file: a prompt may hold every other character that ends a line somewhere."""
    if config.prompts_file is None:
        return [config.prompt]
    if config.prompt:
        raise ValueError(f"prompt={config.prompt} and prompts_file={config.prompts_file} exclude each other")
    try:
        lines = Path(config.prompts_file).read_bytes().decode("utf-8").split("\n")
    except OSError as error:
        raise ValueError(
            f"prompts_file={config.prompts_file} can't be read ({error.strerror}); give a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts_file={config.prompts_file} is not UTF-8 text ({error})") from error
    lines = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    if not lines:
        raise ValueError(f"prompts_file={config.prompts_file} is empty; write one prompt a line")
    return lines


class Printer:
    """Prints a text as its tokens come, but for an end that may still become a stop string or a character."""

    def __init__(self, prompt: str, stop: StopAt):
        self.stop, self.printed = stop, 0
        self.held = max((len(text) for text in stop.stop), default=1) - 1
        self._print(prompt)

    def __call__(self, row: int, tokens: list[int]) -> bool:
        if self.stop(row, tokens):
            return True
        text = self.stop.text(tokens).rstrip("\ufffd")
        self._advance(text[: max(self.printed, len(text) - self.held)])
        return False

    def finish(self, tokens: list[int]) -> None:
        self._advance(self.stop.text(tokens))
        print()

    def _advance(self, text: str) -> None:
        self._print(text[self.printed :])
        self.printed = max(self.printed, len(text))

    def _print(self, text: str) -> None:
        print(text, end="", flush=True)


if __name__ == "__main__":
    main()
