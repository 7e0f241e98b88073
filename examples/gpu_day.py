"""All measurements that only a GPU can make, in order, within 40 minutes: expected beside found, hazards first.

    python examples/gpu_day.py --folder day             # all steps; run again after a break, it skips what is done
    python examples/gpu_day.py --folder day attention   # one step by name, also if it was done

Each step is a command of its own, whose output is kept in the folder, as NAME.md. A step that would not end in time is
left out; a step that crashes, as after an illegal access of memory, does not stop the others.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SPEED = ["--rates", "0.8", "--new_tokens", "256", "--repetitions", "5", "--batch_sizes", "1"]
OURS = [
    "ours, 5 candidates", "ours, 7 candidates", "ours, 5 candidates, compile=True",
    "ours, 7 candidates, compile=True", "ours, tree of 30, compile=True", "ours, throughput, compile=True",
]  # fmt: skip
LONG = [*SPEED, "--shapes", "8b", "--no_compile", "--ours", OURS[0], "--seconds", "120", "--prompt"]
DONE = "<!-- done -->"


@dataclass
class Step:
    """A command, the minutes that it may take, the question that it answers, and the expected answer on an H100, from
    counted kernels and from measurements of earlier versions (docs/gpu.md)."""

    minutes: float
    decides: str
    expected: str
    command: Sequence[str]


def bench(*arguments: str) -> list[str]:
    return [str(HERE / "bench_gpu.py"), *arguments]


STEPS = {
    "hazards": Step(4, "Can a graph give wrong text, or end the process?", "all as in its table",
                    [str(HERE / "gpu_hazards.py")]),
    "tests": Step(5, "Is the code right on a GPU?", "all pass",
                  ["-m", "pytest", "-q", str(HERE.parent / "tests/generate/test_cuda.py"), "-m", "slow or not slow"]),
    "attention": Step(3, "From which length should long caches be read in pieces?",
                      "chosen, by rows: 25 us (1024), 200 (8192), 800 (32768); split 14, 20, 45",
                      [str(HERE / "gpu_attention.py")]),
    "pieces": Step(4, "Is compile=True needed?",
                   "8b 8.6, norms 7.7, compiled 7.1; smollm2 3.0, 2.3, 1.9; LM head of 8b 0.32, float8 0.17 ms",
                   [str(HERE / "gpu_pieces.py")]),
    "8b": Step(6, "How fast is 8B's shape?", "7.0 times plain, 2.7 times compiled; host at most 0.35 ms; throughput at "
               "least 0.97 of the best", bench(*SPEED, "--shapes", "8b", "--ours", *OURS, "--seconds", "340")),
    "smollm2": Step(4, "And SmolLM2's?", "13.5 times plain, 1.9 times compiled",
                    bench(*SPEED, "--shapes", "smollm2", "--ours", *OURS, "--seconds", "220")),
    "1.5b": Step(3, "And 1.5B's?", "10 times plain; throughput at least 0.97 of the best",
                 bench(*SPEED, "--shapes", "1.5b", "--ours", *OURS, "--seconds", "130")),
    "4096": Step(2, "What do long texts cost?", "a round of 5 at most 1.1 times that of step 8b", bench(*LONG, "4096")),
    "16384": Step(3, "And longer ones?", "a round of 5 at most 1.4 times that of step 8b", bench(*LONG, "16384")),
    "overlap": Step(2, "What would it bring to launch a round before the last one is read?",
                    "0.2 ms less for 8b, 0.5 for smollm2",
                    [str(HERE / "gpu_overlap.py")]),
    "batches": Step(4, "How fast are batches?", "at least 3 times plain at 16 rows",
                    bench("--shapes", "8b", "--rates", "0.8", "--batch_sizes", "8", "16", "32", "--no_compile",
                          "--ours", OURS[0], "--new_tokens", "128", "--seconds", "220")),
}  # fmt: skip


def run(command: Sequence[str], seconds: float) -> tuple[str, bool]:
    """The output of a Python command, and whether it succeeded within so many seconds."""
    try:
        done = subprocess.run(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds,
            check=False,
        )  # fmt: skip
        return done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return (
            f"{output if isinstance(output, str) else output.decode(errors='replace')}\nended after {seconds:.0f} s",
            False,
        )


def found_in(output: str) -> str:
    """What a report says: the rows of its tables, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    rows = [line for line in lines if line.startswith("|") and not line.startswith("|---")]
    return "\n".join(rows or lines[-1:])


def make(
    names: Sequence[str], folder: Path, minutes: float, again: bool = False,
    run: Callable[[Sequence[str], float], tuple[str, bool]] = run,
) -> list[str]:  # fmt: skip
    """Run steps in order, and print what each found. Returns the names of steps that are not done: they failed, or
    there was no time.

    Args:
        folder: keeps the outputs; steps whose output is complete there are skipped.
        minutes: for all steps together.
        again: also run steps that are done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end, left = time.monotonic() + 60 * minutes, []
    for name in names:
        step, file = STEPS[name], folder / f"{name}.md"
        print(f"\n## {name}: {step.decides}\n\nexpected: {step.expected}", flush=True)
        if not again and file.exists() and file.read_text(encoding="utf-8").endswith(DONE):
            print(f"done before: {file}", flush=True)
            continue
        if time.monotonic() + 60 * step.minutes > end:
            print(f"left out: it may take {step.minutes:g} minutes, and there are less", flush=True)
            left.append(name)
            continue
        output, succeeded = run(step.command, 60 * step.minutes)
        file.write_text(output + DONE * succeeded, encoding="utf-8")
        print(f"found:\n{found_in(output)}{'' if succeeded else f'{chr(10)}failed: see {file}'}", flush=True)
        if not succeeded:
            left.append(name)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=STEPS, help="steps; default: all, in order")
    parser.add_argument("--folder", type=Path, default=Path("gpu_day"), help="for the outputs")
    parser.add_argument("--minutes", type=float, default=40.0, help="for all steps together")
    options = parser.parse_args()
    left = make(options.names or list(STEPS), options.folder, options.minutes, again=bool(options.names))
    print(f"\nnot done: {', '.join(left) or 'nothing'}")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
