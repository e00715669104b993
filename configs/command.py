"""The command line of every script: Hydra's overrides, one-line errors, `--help`.

Hydra's compose API is used instead of `@hydra.main`, because that one makes its own output directory in every rank of
a torchrun, and reports a mistyped key on seven lines.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.schema import SCHEMAS

CONFIGS = Path(__file__).resolve().parent
# The keys of a position slot belong to its kind, which checks them itself, so Hydra must let any of them in.
SLOT_KEY = re.compile(r"^(?=position\.(rotary|query_scale|logits|core)\.\w+=)")

NEED_EXPERIMENT = ("sweep", "reproduce")

# Free text, which is taken as it is: any quotes, brackets, commas and ${...} are the user's own.
TEXT_KEYS = {"generate": ("prompt",), "report": ("title",)}


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """The resolved config `configs/<config_name>.yaml` under Hydra overrides, typed by its schema where it has one.

    Raises ValueError, in one line that names the key, the value and what would be right.
    """
    _check_experiment(config_name, overrides)
    texts = dict(word.split("=", 1) for word in overrides if word.split("=", 1)[0] in TEXT_KEYS.get(config_name, ()))
    words = [word for word in overrides if word.split("=", 1)[0] not in texts]
    _check_words(config_name, words)
    opened = [SLOT_KEY.sub("++", word) for word in words]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        try:
            config = hydra_compose(config_name, overrides=opened)
            if schema := SCHEMAS.get(config_name):
                config = OmegaConf.merge(OmegaConf.structured(schema), config)
            OmegaConf.resolve(config)
        except (HydraException, OmegaConfBaseException, TypeError) as error:
            raise ValueError(_explain(config_name, overrides, error)) from error
    assert isinstance(config, DictConfig)
    _check_range(OmegaConf.to_container(config))
    for key, text in texts.items():
        config[key] = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # OmegaConf reads back what was typed
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ValueError(f"{missing[0]} is not set; add {missing[0]}=... to the command")
    return config


def command(config_name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Turns `main(config)` into a command: composes `configs/<config_name>.yaml` from the words of the command line.

    A ValueError or an OSError (a user's mistake, a damaged file, a full disk) ends the process with exit code 2 and one
    line on stderr; HYDRA_FULL_ERROR=1 shows the traceback instead. Any other exception is a bug, with its traceback.
    """

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        @wraps(main)
        def run() -> None:
            words = sys.argv[1:]
            try:
                if {"--help", "-h"} & set(words):
                    print(_help(config_name, sys.modules[main.__module__].__doc__ or ""))
                    return
                main(compose(config_name, words))
            except BrokenPipeError:  # the reader, such as `head`, has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(1)
            except (ValueError, OSError) as error:
                if os.environ.get("HYDRA_FULL_ERROR") == "1":
                    raise
                notes = getattr(error, "__notes__", [])  # which process it is, where only one of them fails
                if notes or os.environ.get("RANK", "0") == "0":  # else every process fails alike: say it once
                    print("error:", " ".join(" ".join([str(error), *notes]).split()), file=sys.stderr, flush=True)
                sys.exit(2)

        return run

    return decorate


def _check_experiment(config_name: str, overrides: list[str]) -> None:
    """configs/experiment/ holds recipes (settings of train.py) and sweeps (many runs); says which is which.

    Raises ValueError, too, where one must be chosen and none is: a default would overwrite results that are kept.
    """
    chosen = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("experiment=")]
    if config_name in NEED_EXPERIMENT and chosen[-1:] in ([], [""], ["null"]):
        names = ", ".join(_options("experiment", config_name))
        raise ValueError(f"experiment is not set; add experiment=NAME, one of: {names}")
    for word in overrides:
        key, _, name = word.partition("=")
        path = CONFIGS / "experiment" / f"{name}.yaml"
        if key.lstrip("+") != "experiment" or not path.is_file():
            continue
        is_recipe = _is_recipe(path)
        if is_recipe and config_name != "train":
            raise ValueError(f"{word} is the recipe of one run, not a sweep; use it as: python train.py {word}")
        if not is_recipe and config_name == "train":
            raise ValueError(f"{word} is a sweep of many runs; use it as: python scripts/sweep.py {word}")


def _check_words(config_name: str, words: list[str]) -> None:
    """Raises ValueError for a word that Hydra can't read, and for a list of a group's files, which would be blended.

    Only recipes of train.py are made to be laid over each other: experiment=[162m_4k,mine].
    """
    parser = OverridesParser.create()
    for word in words:
        key, _, value = word.partition("=")
        try:
            is_list = isinstance(parser.parse_override(word).value(), list)
        except HydraException as error:
            reason = "" if value else "; a setting is KEY=VALUE"
            quoted = f"; quote a value with special characters: '{key}=\"{value}\"'" if value else ""
            raise ValueError(f"can't read {word}{reason}{quoted}") from error
        group = key.lstrip("+")
        if is_list and (CONFIGS / group).is_dir() and (group, config_name) != ("experiment", "train"):
            raise ValueError(f"{word}: a group takes one name, such as {group}={_options(group, config_name)[0]}")


def _check_range(node: object, key: str = "") -> None:
    """Raises ValueError for a whole number that 64 bits don't hold: torch would overflow, far from its key."""
    if isinstance(node, dict):
        for name, child in node.items():
            _check_range(child, f"{key}.{name}".lstrip("."))
    elif isinstance(node, list):
        for child in node:
            _check_range(child, key)
    elif isinstance(node, int) and not -(2**63) <= node < 2**63:
        raise ValueError(f"{key}={node} is too large; use a whole number of at most {2**63 - 1}")


def _help(config_name: str, doc: str) -> str:
    text = (CONFIGS / f"{config_name}.yaml").read_text()
    groups = re.findall(r"^  - (?:override )?(\w+): ", text, flags=re.MULTILINE)
    lines = [doc.strip(), "", "Every key below can be set as key=value (Hydra overrides).", ""]
    for group in groups:
        lines.append(f"{group}: {', '.join(_options(group, config_name))}")
    return "\n".join([*lines, "", text.strip()])


def _options(group: str, config_name: str) -> list[str]:
    paths = sorted((CONFIGS / group).glob("*.yaml"))
    if group == "experiment":
        paths = [path for path in paths if _is_recipe(path) == (config_name == "train")]
        paths = [path for path in paths if config_name != "sweep" or not _only_calculates(path)]
    return [path.stem for path in paths]


def _is_recipe(path: Path) -> bool:
    """Whether a file of configs/experiment/ holds settings of train.py, and not a sweep of many runs."""
    return "@package _global_" in path.read_text()


def _only_calculates(path: Path) -> bool:
    """Whether a file of configs/experiment/ has no runs, so that only scripts/reproduce.py can use it."""
    return re.search(r"^calculate:", path.read_text(), flags=re.MULTILINE) is not None


def _explain(config_name: str, overrides: list[str], error: Exception) -> str:
    """One line out of Hydra's several."""
    text = str(error)
    if isinstance(error, TypeError):  # Hydra's own, for a list where a name should be
        return f"can't read {' '.join(overrides)}: a group takes one name, such as position=rope"
    if unknown := re.search(r"Could not find '(\w+)/([^']+)'", text):
        group, value = unknown.groups()
        return f"{group}={value} is unknown; choose one of: {', '.join(_options(group, config_name))}"
    if unknown := re.search(r"Could not override '([^']+)'", text):
        key = unknown.group(1)
        return f"{key}={_given(overrides, key)}: there is no such key{_nearest(config_name, key, overrides)}"
    if unknown := re.search(r"Interpolation key 'scales\.([^']+)\.\w+' not found", text):
        scales = ", ".join(hydra_compose(config_name).scales)
        return f"scale={unknown.group(1)} is unknown; choose one of: {scales}"
    if typed := re.search(r"full_key: (\S+)", text):
        key = typed.group(1)
        if "not a ListConfig" in text:
            return f"{key}={_given(overrides, key)} must be a list, such as {key}=[{_given(overrides, key)}]"
        return f"{key}: {text.splitlines()[0]}"
    return " ".join(text.split())


def _given(overrides: list[str], key: str) -> str:
    """What the command line says of a key."""
    return next((word.split("=", 1)[1] for word in overrides[::-1] if word.lstrip("+").startswith(f"{key}=")), "")


def _nearest(config_name: str, key: str, overrides: list[str]) -> str:
    chosen = [word for word in overrides if word.startswith("experiment=")]
    keys = _flat_keys(OmegaConf.to_container(hydra_compose(config_name, overrides=chosen)))
    near = difflib.get_close_matches(key, keys, n=1) or [known for known in keys if known.split(".")[-1] == key][:1]
    return f"; did you mean {near[0]}?" if near else f"; `--help` lists them ({', '.join(sorted(keys)[:8])}, ...)"


def _flat_keys(node: object, prefix: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [prefix]
    return [key for name, child in node.items() for key in _flat_keys(child, f"{prefix}.{name}".lstrip("."))]
