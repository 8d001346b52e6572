"""Perplexity of held text, and each variant's distance from the baseline's distribution: a table for the report.

print(distribution_markdown(report))
"""

from __future__ import annotations

from pipeline.distribution_results import DistributionResult
from pipeline.results import Report
from pipeline.text_table import figure_cell, markdown_table

_PERPLEXITY = (
    *(
        "variant",
        "scored tokens",
        "perplexity/token",
        "± stderr",
        "perplexity/word",
        "perplexity/byte",
        "bits/byte",
    ),
    *("± stderr", "ln(PPL ÷ baseline's)", "± stderr"),
)
_DISTANCE = (
    *(
        "variant",
        "KL mean",
        "± stderr",
        "median",
        "p99",
        "p99.9",
        "max",
        "same top-1 %",
        "± stderr",
        "same top-5 %",
    ),
    *("RMS Δp %", "mean Δp %"),
)


def distribution_markdown(report: Report) -> str:
    """Both tables and what was scored; "" where no text was."""
    found = [
        (variant.name, variant.quality.distribution)
        for variant in report.variants
        if variant.quality and variant.quality.distribution
    ]
    if not found:
        return ""
    one = found[0][1]
    scored = (
        f"Windows of {one.context_tokens} tokens, the second half of each scored, on a text with SHA-256 "
        f"{one.text_sha256[:16]}…; standard errors are over windows. KL in nats a token."
    )
    parts = [scored, markdown_table(_PERPLEXITY, [_perplexity_row(name, result) for name, result in found])]
    distances = [row for name, result in found if (row := _distance_row(name, result))]
    if distances:
        parts.append(markdown_table(_DISTANCE, distances))
    return "\n\n".join(parts)


def _perplexity_row(name: str, result: DistributionResult) -> tuple[str, ...]:
    distance = result.distance
    return (
        name,
        f"{result.scored_tokens:,}",
        figure_cell(result.token_perplexity, ".5g"),
        figure_cell(result.token_perplexity_stderr, ".2g"),
        figure_cell(result.word_perplexity, ".5g"),
        figure_cell(result.byte_perplexity, ".5g"),
        figure_cell(result.bits_per_byte, ".5g"),
        figure_cell(result.bits_per_byte_stderr, ".2g"),
        figure_cell(distance.log_perplexity_ratio if distance else None, "+.5f"),
        figure_cell(distance.log_perplexity_ratio_stderr if distance else None, ".2g"),
    )


def _distance_row(name: str, result: DistributionResult) -> tuple[str, ...] | None:
    distance = result.distance
    if distance is None:
        return None
    shares = (
        distance.top1_agreement_share,
        distance.top1_agreement_share_stderr,
        distance.top5_agreement_share,
        distance.probability_difference_rms,
        distance.probability_difference_mean,
    )
    nats = (
        distance.kl_mean_nats,
        distance.kl_mean_nats_stderr,
        distance.kl_median_nats,
        distance.kl_p99_nats,
        distance.kl_p999_nats,
        distance.kl_max_nats,
    )
    return (
        name,
        *(figure_cell(value, ".3g") for value in nats),
        *(figure_cell(None if share is None else 100 * share, ".3f") for share in shares),
    )
