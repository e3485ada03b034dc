"""`python -m fuzz` (with tests/ on PYTHONPATH): random cases for some time, the same ones, or a case again.

Ends with a table of outcomes, and with exit code 1 if a case failed; the cases that did are kept in build/fuzz/.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from fuzz.driver import KEPT, LIMIT_S, STRATEGIES, Child, Session
from own_cache import use_own_cache

CASES_A_BATCH = 40
OF_A_THOUSAND = {
    "gguf": 180,
    "safetensors": 130,
    "config": 130,
    "tokenizer": 140,
    "template": 60,
    "command": 130,
    "convert": 90,
    "body": 80,
    "http": 40,
    "planted": 20,
}
NEVER_REFUSED = {"planted"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Feeds llmcl with damaged and hostile input.")
    parser.add_argument("--seconds", type=float, default=3600, help="how long (default: an hour)")
    parser.add_argument("--subject", action="append", choices=[*STRATEGIES], help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, help="of the first batch; the default is drawn, and printed")
    parser.add_argument("--limit", type=float, default=2 * LIMIT_S, help="seconds that a case may take")
    parser.add_argument("--same", type=int, metavar="N", help="about N cases, the same each time, no new kernels")
    parser.add_argument("--case", type=Path, help="run the case kept in this folder, and nothing else")
    options = parser.parse_args()
    use_own_cache()
    child = Child(options.limit, compiles=options.same is None)
    try:
        if options.same is not None:
            return same(child, options.same)
        return again(child, options.case) if options.case else fuzz(child, options)
    finally:
        child.close()


def again(child: Child, folder: Path) -> int:
    outcome = child.run(folder.resolve())
    print("\n".join(f"{name}: {text}" for name, text in outcome.items()))
    return int(outcome["outcome"] == "failed")


def same(child: Child, n_cases: int) -> int:
    with tempfile.TemporaryDirectory() as work:
        session = Session(child, Path(work))
        for subject, n in OF_A_THOUSAND.items():
            session.batch(subject, -(-n * n_cases // 1000), seed_number=1)
    print(session.report())
    both = {*OF_A_THOUSAND} - NEVER_REFUSED
    one_sided = [s for s in both if not (session.counts[s, "worked"] and session.counts[s, "refused"])]
    if n_cases < 1000:  # too few to show both
        one_sided = []
    if one_sided:
        print(f"nothing worked or nothing was refused: {', '.join(one_sided)}")
    return int(bool(session.failures or one_sided))


def fuzz(child: Child, options: argparse.Namespace) -> int:
    first = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    print(f"seed {first}; cases that fail are kept in {KEPT}", flush=True)
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as work:
        session = Session(child, Path(work))
        number = first
        try:
            while time.monotonic() < end:
                for subject in options.subject or STRATEGIES:
                    known = set(session.failures)
                    session.batch(subject, CASES_A_BATCH, number)
                    for cause in session.failures.keys() - known:
                        print(session.failures[cause], end="\n\n", flush=True)
                number += 1
                child.close()  # compilers hold on to memory
        except KeyboardInterrupt:
            print("stopped")
    print(session.table())
    causes = len(session.failures)
    print(f"{causes} causes of failures, kept in {KEPT}" if causes else "no case failed")
    return int(causes > 0)


if __name__ == "__main__":
    sys.exit(main())
