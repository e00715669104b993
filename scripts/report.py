"""One HTML page about runs, to open in a browser or to send: python scripts/report.py 'run_dirs=[runs/quickstart/*]'

Curves, tables, loss by length and position, needle maps, what differs between the configs, and how each run went, from
the files in the run directories; what is missing or broken there is said in the page. It loads nothing from elsewhere.
"""

import shlex
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

from configs.command import command


@command("report")
def main(config: Any) -> None:
    from eval.report import find_run_dirs, read_runs  # here, because it takes its time, and --help should not
    from eval.report_page import render, write_page
    from training.environment import commit

    out = Path(config.out)
    if out.is_dir() or out.suffix not in (".html", ".htm"):
        raise ValueError(f"out={config.out} must be the name of a page, such as out=report.html")
    runs = read_runs(find_run_dirs(config.run_dirs), config.pictures)
    made_by = {
        "command": shlex.join(["python", "scripts/report.py", *sys.argv[1:]]),
        "commit": commit() or "unknown",
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    count = f"{len(runs)} training run{'s' * (len(runs) != 1)}"
    write_page(out, render(runs, config.title or count, made_by))
    for run in runs:
        for problem in run.broken:
            print(f"broken: {run.run_dir}/{problem}", file=sys.stderr)
    print(f"{count}, {out.stat().st_size / 1e6:.2f} MB: written to {out}")


if __name__ == "__main__":
    main()
