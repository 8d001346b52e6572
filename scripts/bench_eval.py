"""Times log-likelihood tasks with shared prefixes beside stock lm-eval: same model, same requests, in alternation.

Stock is lm-eval's own `HFLM` at its best batch size of a small sweep; ours is the quality stage's harness with an empty
journal, its comparison with lm-eval included. A suite takes as many documents (at most `--limit`) as fit into its
seconds. Every answer is compared, and every document's metrics; what 1e-4 nats explain is a tie. Tokens are counted
twice: those of the texts, and, by a hook on the model, all that went through it with padding. Writes
`bench_eval.json` and `bench_eval.md` to FOLDER and prints the page.

    python -m scripts.bench_eval FOLDER [--model DIRECTORY] [--suites piqa mmlu-5shot] [--limit 200] [--repeats 3]
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from evals.fetch_data import DATA_FOLDER
from pipeline.answer_journal import AnswerJournal
from pipeline.errors import PipelineError
from pipeline.hardware import detect
from pipeline.harness import make_harness
from pipeline.harness_setting import quiet
from pipeline.measured import Distribution
from pipeline.quality import QualityRequest, load_tasks
from pipeline.text_table import markdown_table
from pipeline.tokenizer_facts import load_tokenizer
from pipeline.values import Value
from scripts.compared_answers import (
    NATS_ALLOWED,
    Asked,
    Difference,
    differing_documents,
    differing_flags,
)
from scripts.compared_times import say, write_comparison
from scripts.fetch_demo_model import MODEL_FOLDER

TASK_FOLDER = Path(__file__).parents[1] / "evals"
BATCH_SIZES = (1, 4, 16)
SHARE_WANTED = 0.85
_FOUR_CHOICES, _FIXED_HEADER = 2.5, 5.0
_SWEEP_TOKENS = 4000
_FEWEST_DOCUMENTS = 6


@dataclass(frozen=True)
class Suite:
    """Tasks that are timed together; `members` are those taken of a group.

    `wanted_speedup` is asked for wherever the ratio of tokens reaches it.
    """

    task: str
    members: tuple[str, ...] = ()
    what: str = "0-shot"
    wanted_speedup: float | None = None


SUITES = {
    "hellaswag": Suite("hellaswag_local", wanted_speedup=_FOUR_CHOICES),
    "sciq": Suite("sciq_local", wanted_speedup=_FOUR_CHOICES),
    "piqa": Suite("piqa_local"),  # two choices
    "arc-challenge": Suite("arc_challenge_local", wanted_speedup=_FOUR_CHOICES),
    "arc-challenge-25shot": Suite(
        "arc_challenge_25shot_local",
        what="25 shots, the same before every question",
        wanted_speedup=_FIXED_HEADER,
    ),
    # The first two subjects of the alphabet: a header serves one subject only, so few questions of many say nothing.
    "mmlu-5shot": Suite(
        "mmlu_5shot_local",
        members=("abstract_algebra", "anatomy"),
        what="5 shots, the same before every question of a subject",
        wanted_speedup=_FIXED_HEADER,
    ),
}


class Timed(Value):
    """One suite by both ways; `share` is how much of the saving in tokens the time shows."""

    suite: str
    what: str
    tasks: tuple[str, ...]
    documents: int
    requests: int
    scoring: tuple[str, ...]
    stock_batch_size: int
    our_batch_size: int
    stock_tokens: int
    our_tokens: int
    stock_padded_tokens: int
    our_padded_tokens: int
    stock_s: Distribution
    ours_s: Distribution
    speedup: Distribution
    wanted_speedup: float | None
    largest_difference_nats: float
    greedy_differences: tuple[Difference, ...]
    differing_documents: tuple[Difference, ...]

    @property
    def token_ratio(self) -> float:
        """Stock's tokens ÷ ours, without padding; the comparison's tokens are ours."""
        return self.stock_tokens / self.our_tokens

    @property
    def share(self) -> float:
        """Median speed-up ÷ token ratio."""
        return self.speedup.median / self.token_ratio

    @property
    def fast_enough(self) -> bool | None:
        """Whether the wanted speed-up is reached; None where none is wanted or the tokens don't allow it."""
        if self.wanted_speedup is None or self.token_ratio < self.wanted_speedup:
            return None
        return self.speedup.median >= self.wanted_speedup

    @property
    def same(self) -> bool:
        """Whether the answers are stock's, greedy flags and metrics too, but for ties."""
        ties = all(one.tie for one in (*self.greedy_differences, *self.differing_documents))
        return ties and self.largest_difference_nats <= NATS_ALLOWED

    @property
    def holds(self) -> bool:
        """Whether the time follows the tokens, is as short as wanted, and the answers are the same."""
        return self.share >= SHARE_WANTED and self.fast_enough is not False and self.same


class Bench(Value):
    """Everything that was timed, on what; `missing` says why a suite wasn't."""

    model: str
    device: str
    threads: int
    versions: dict[str, str]
    suites: tuple[Timed, ...]
    missing: dict[str, str]


# --- one suite --------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """One way, once: seconds, answers by task, tokens that went through the model."""

    seconds: float
    answers: dict[str, list[Any]]
    padded_tokens: int


@dataclass
class Bencher:
    """A loaded model and both ways to ask it."""

    model: Any
    folder: Path
    seconds: float
    limit: int
    repeats: int
    harness: Any = None

    def time(self, name: str, suite: Suite) -> Timed:
        """Sweep on a few documents, then `repeats` rounds of both ways in alternating order."""
        start = time.monotonic()
        with quiet():
            tasks = _tasks(suite, limit=self.limit)
        few = {task: of_document[: self._sweep_documents(of_document)] for task, of_document in tasks.items()}
        stock_size, stock_s = self._best(self._stock, few, f"{name}: stock")
        our_size, _ = self._best(self._ours, few, f"{name}: ours")
        left_s = self.seconds - (time.monotonic() - start)
        fitting = int(left_s / self.repeats / (1.5 * stock_s / _documents(few)) / len(tasks))
        count = min(self.limit, max(_FEWEST_DOCUMENTS, fitting))
        asked = {task: of_document[:count] for task, of_document in tasks.items()}
        stock: list[Run] = []
        ours: list[Run] = []
        for repeat in range(self.repeats):
            ways = [(self._stock, stock_size, stock), (self._ours, our_size, ours)]
            for way, size, runs in ways if repeat % 2 else reversed(ways):
                say(f"{name}: {_documents(asked)} documents, repeat {repeat + 1} of {self.repeats}")
                runs.append(way(asked, size))
        return self._timed(name, suite, asked, stock, ours, sizes=(stock_size, our_size))

    def _sweep_documents(self, of_document: Sequence[Sequence[Any]]) -> int:
        letters = [sum(len(request.args[0]) + len(request.args[1]) for request in one) for one in of_document]
        return max(1, min(len(letters), int(_SWEEP_TOKENS * 4 / (sum(letters) / len(letters)))))

    def _best(
        self, way: Callable[[Mapping[str, Any], int], Run], asked: Mapping[str, Any], what: str
    ) -> tuple[int, float]:
        found = {}
        for size in BATCH_SIZES:
            found[size] = way(asked, size).seconds
            say(f"{what}: batch size {size}, {_documents(asked)} documents: {found[size]:.2f} s")
        best = min(found, key=lambda size: found[size])
        return best, found[best]

    def _stock(self, asked: Asked, size: int) -> Run:
        from lm_eval.models.huggingface import HFLM

        with quiet():
            tokenizer = load_tokenizer(self.folder, chat_template=False)
            return self._run(asked, HFLM(self.model, tokenizer=tokenizer, batch_size=size))

    def _ours(self, asked: Asked, size: int) -> Run:
        with quiet():
            tokenizer = load_tokenizer(self.folder, chat_template=False)
            request = _request(("",), batch_size=size, limit=self.limit)
            harness = make_harness(
                self.model, tokenizer, request, progress=lambda _: None, journal=AnswerJournal()
            )
            run = self._run(asked, harness)
        self.harness = harness
        return run

    def _run(self, asked: Asked, harness: Any) -> Run:
        answers = {}
        with _counting(self.model) as counted:
            start = time.perf_counter()
            for task, of_document in asked.items():
                answers[task] = harness.loglikelihood(
                    [one for requests in of_document for one in requests], disable_tqdm=True
                )
            seconds = time.perf_counter() - start
        return Run(seconds=seconds, answers=answers, padded_tokens=sum(counted))

    def _timed(
        self,
        name: str,
        suite: Suite,
        asked: Asked,
        stock: Sequence[Run],
        ours: Sequence[Run],
        *,
        sizes: tuple[int, int],
    ) -> Timed:
        answers = stock[0].answers, ours[0].answers
        pairs = [pair for task in asked for pair in zip(*(one[task] for one in answers), strict=True)]
        told = [self.harness.scorer.told[task] for task in asked]
        return Timed(
            suite=name,
            what=suite.what,
            tasks=tuple(asked),
            documents=_documents(asked),
            requests=len(pairs),
            scoring=tuple(sorted({one.way for one in told})),
            stock_batch_size=sizes[0],
            our_batch_size=sizes[1],
            stock_tokens=sum(one.scored_tokens for one in told),
            our_tokens=sum(one.computed_tokens for one in told),
            stock_padded_tokens=stock[0].padded_tokens,
            our_padded_tokens=ours[0].padded_tokens,
            stock_s=Distribution.of([run.seconds for run in stock]),
            ours_s=Distribution.of([run.seconds for run in ours]),
            speedup=Distribution.of([a.seconds / b.seconds for a, b in zip(stock, ours, strict=True)]),
            wanted_speedup=suite.wanted_speedup,
            largest_difference_nats=max(abs(one[0] - other[0]) for one, other in pairs),
            greedy_differences=tuple(differing_flags(asked, *answers, harness=self.harness)),
            differing_documents=tuple(differing_documents(asked, *answers)),
        )


@contextlib.contextmanager
def _counting(model: Any) -> Iterator[list[int]]:
    """Tokens of every call of the model, padding included."""
    seen: list[int] = []

    def count(_: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        ids = keywords.get("input_ids", arguments[0] if arguments else None)
        assert ids is not None
        seen.append(ids.numel())

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def _documents(asked: Mapping[str, Sequence[Any]]) -> int:
    return sum(map(len, asked.values()))


def _request(tasks: tuple[str, ...], *, batch_size: int, limit: int) -> QualityRequest:
    return QualityRequest(
        tasks=tasks,
        task_folders=(str(TASK_FOLDER),),
        data_folder=str(DATA_FOLDER),
        limit=limit,
        seed=1234,
        batch_size=batch_size,
        num_fewshot=None,
        apply_chat_template=False,
        max_length_tokens=None,
        confirm_unsafe_code=False,
    )


def _tasks(suite: Suite, *, limit: int) -> dict[str, list[list[Any]]]:
    """Requests of the first `limit` documents, document by document, of every task of a suite."""
    loaded = load_tasks(_request((suite.task,), batch_size=1, limit=limit))
    chosen = {
        name: task
        for name, task in loaded.items()
        if not suite.members or name.split("::")[-1] in suite.members
    }
    found = {}
    for name, task in chosen.items():
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        by_document: dict[int, list[Any]] = {}
        for instance in task.instances:
            instance.task_object = task
            by_document.setdefault(instance.doc_id, []).append(instance)
        found[name] = list(by_document.values())
    return found


# --- the page ---------------------------------------------------------------------------------------------


def page(bench: Bench) -> str:
    """The timings as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in bench.versions.items())
    return "\n\n".join(
        (
            "# Log-likelihood tasks beside stock lm-eval",
            f"{bench.model} in FP32 on {bench.device}, {bench.threads} thread(s); {versions}. The same requests "
            f"through lm-eval's HFLM at its best batch size of {', '.join(map(str, BATCH_SIZES))} and through shared "
            "prefixes, in alternation. Tokens are those of the texts (with padding in brackets); ours hold the "
            "comparison with lm-eval that every evaluation begins with. Speed-up: stock's seconds ÷ ours, median and "
            f"quartiles; wanted is asked for where the token ratio reaches it. Share: speed-up ÷ token ratio; wanted "
            f"at least {SHARE_WANTED:.2f}. Tie: a change of {NATS_ALLOWED:.0e} nats explains the difference.",
            markdown_table(_HEADER, [_row(one) for one in bench.suites], text_columns=("suite", "examples")),
            *(
                f"{one.suite}: {what} {'; '.join(_said(each) for each in found)}."
                for one in bench.suites
                for what, found in (
                    ("metrics differ for", one.differing_documents),
                    ("the greedy flag differs for", one.greedy_differences),
                )
                if found
            ),
            *(f"{name}: not timed: {reason}" for name, reason in bench.missing.items()),
        )
    )


_HEADER = (
    *("suite", "examples", "documents", "requests", "batch", "stock tokens", "our tokens", "token ratio"),
    *("stock s", "our s", "speed-up", "quartiles", "wanted", "share", "largest Δ nats", "greedy ≠"),
    *("documents ≠", "holds"),
)


def _said(difference: Difference) -> str:
    return difference.text + (", a tie" if difference.tie else "")


def _wanted(one: Timed) -> str:
    if one.wanted_speedup is None:
        return "–"
    least = f"{one.wanted_speedup:.1f}"
    if one.fast_enough is None:
        return f"{least} (tokens allow {one.token_ratio:.2f})"
    return least if one.fast_enough else f"{least} (missed)"


def _row(one: Timed) -> tuple[str, ...]:
    return (
        one.suite,
        one.what,
        str(one.documents),
        str(one.requests),
        f"{one.stock_batch_size} / {one.our_batch_size}",
        f"{one.stock_tokens} ({one.stock_padded_tokens})",
        f"{one.our_tokens} ({one.our_padded_tokens})",
        f"{one.token_ratio:.2f}",
        f"{one.stock_s.median:.2f}",
        f"{one.ours_s.median:.2f}",
        f"{one.speedup.median:.2f}",
        f"{one.speedup.lower_quartile:.2f} … {one.speedup.upper_quartile:.2f}",
        _wanted(one),
        f"{one.share:.2f}" + ("" if one.share >= SHARE_WANTED else " (missed)"),
        f"{one.largest_difference_nats:.1e}",
        str(len(one.greedy_differences)),
        str(len(one.differing_documents)),
        "yes" if one.holds else "no",
    )


def bench(model_folder: Path, *, suites: Sequence[str], limit: int, repeats: int, seconds: float) -> Bench:
    """Every suite, one after the other; one whose data are missing is told and left out."""
    import torch
    from transformers import AutoModelForCausalLM

    say(f"loading {model_folder}")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    bencher = Bencher(model=model, folder=model_folder, seconds=seconds, limit=limit, repeats=repeats)
    timed, missing = [], {}
    for name in suites:
        try:
            timed.append(bencher.time(name, SUITES[name]))
        except PipelineError as error:
            missing[name] = str(error)
            say(f"{name}: {error}")
    return Bench(
        model=model_folder.name,
        device=detect().name,
        threads=torch.get_num_threads(),
        versions={name: version(name) for name in ("lm_eval", "torch", "transformers")},
        suites=tuple(timed),
        missing=missing,
    )


def main() -> int:
    """0 when every suite was timed, gives stock's answers and saves the time that is wanted, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--limit", type=int, default=200, help="documents of a task, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--suite-seconds", type=float, default=240.0, help="what a suite may take")
    arguments = parser.parse_args()
    found = bench(
        arguments.model,
        suites=arguments.suites,
        limit=arguments.limit,
        repeats=arguments.repeats,
        seconds=arguments.suite_seconds,
    )
    write_comparison(arguments.folder, "bench_eval", found, page=page(found))
    return 0 if found.suites and not found.missing and all(one.holds for one in found.suites) else 1


if __name__ == "__main__":
    raise SystemExit(main())
