"""Measures what a step of the candidates of docs/decision.md costs, against AdamW's, on the models of ``ngplus bench``.

    python tools/step_cost.py --models transformer mlp --repeats 9

AdamW and the candidate take turns on the gradients of one batch. The candidate makes roots in every second step, so
that each round has a step with new roots and one without. The cost of a training step with roots every T steps is the
pass plus ((T - 1) plain + refresh) / T, divided by the pass plus AdamW's step. Let nothing else run.
"""

from __future__ import annotations

import argparse

import torch

from ngplus.lab.bench.problems import PROBLEMS
from ngplus.lab.bench.timing import Spread, Stopwatch, amortised, take_turns
from ngplus.lab.bench.training import FIRST_ORDER, Contender
from ngplus.lab.candidates import Roots

ALTERNATE_FROM = 6  # steps until Roots(update_every=2) makes roots in every second step only
EVERY = (1, 2, 5, 10, 20)


def measure(name: str, repeats: int, quick: bool, lazy: bool) -> list[str]:
    problem = PROBLEMS[name](quick)
    adamw = Contender(problem, "adamw", FIRST_ORDER["adamw"])
    model = problem.model()
    roots = Roots(model, lr=1e-6, update_every=2, lazy=lazy)

    def copy_gradients() -> None:
        for own, other in zip(model.parameters(), adamw.model.parameters(), strict=True):
            own.grad = None if other.grad is None else other.grad.clone()

    def candidate(watch: Stopwatch) -> None:
        for kind in ("refresh", "plain"):
            copy_gradients()
            with watch.time(f"roots.{kind}"):
                roots.step()

    adamw.train(Stopwatch(), "adamw")
    for _ in range(ALTERNATE_FROM):
        copy_gradients()
        roots.step()
    times = take_turns({"adamw": lambda watch: adamw.train(watch, "adamw"), "roots": candidate}, repeats)
    wall = {key: value[:, 0] for key, value in times.items()}
    base = wall["adamw.pass"] + wall["adamw.step"]
    cells = []
    for every in EVERY:
        own = wall["adamw.pass"] + amortised(wall["roots.plain"], wall["roots.refresh"], every)
        spread = Spread.of(own / base)
        cells.append(f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})")
    seconds = {key: Spread.of(value).median for key, value in wall.items()}
    print(f"{problem.title}: " + ", ".join(f"{key} {1000 * value:.0f} ms" for key, value in seconds.items()))
    return [problem.title, *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small models, to see the tool at work")
    parser.add_argument("--lazy", action="store_true", help="L and R take in a gradient where roots are made")
    asked = parser.parse_args()
    torch.manual_seed(0)
    rows = [measure(name, asked.repeats, asked.quick, asked.lazy) for name in asked.models]
    print("| training step against AdamW's | " + " | ".join(f"T = {every}" for every in EVERY) + " |")
    print("| --- " * (len(EVERY) + 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
