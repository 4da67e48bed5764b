"""The generated figures of docs/data.md, from results/; render.py puts them there."""

from __future__ import annotations

from textwrap import fill
from typing import Any

WIDTH = 118


def reader_block(facts: dict[str, Any]) -> str:
    rates, ours = facts["documents_per_cpu_second"], facts["runs"]["ours"]
    return _filled(f"""
        `python bench/reader.py` (results/reader.json): one row group of 2 GB of text
        ({facts["file_mb"]:.0f} MB, zstd), {ours["documents"]:,} documents, read to its end:
        {facts["peak_mb"]:.0f} MB at most (the imports alone take {facts["imports_mb"]:.0f}),
        {facts["memory_ratio_pyarrow_default"]:.1f} times less than pyarrow with its defaults and
        {facts["memory_ratio_datasets"]:.1f} times less than `datasets` streaming; first document
        after {facts["first_document_seconds"] * 1000:.0f} ms; going on at two thirds of the rows
        takes {facts["resume_milliseconds"]:.0f} ms and {facts["resume_mb"]:.1f} MB. From a server
        on this machine: {facts["peak_mb_http"]:.0f} MB,
        {facts["first_document_seconds_http"] * 1000:.0f} ms,
        {facts["resume_milliseconds_http"]:.0f} ms. Documents per CPU second: ours
        {rates["ours"]:,}, pyarrow {rates["pyarrow_default"]:,}, `datasets` {rates["datasets"]:,}.
    """)


def pipeline_block(facts: dict[str, Any]) -> str:
    parts = facts["cpu_seconds_per_million"]
    return _filled(f"""
        `{facts["command"]}` (results/pipeline.json): {facts["num_sources"]} sources over HTTP with
        40 ms a request, mixed, encoded with MiniCPM4's tokenizer, salient spans in a quarter of the
        rows, packed into rows of 2,048: {facts["peak_mb"]:.0f} MB at most and
        {facts["tokens_per_cpu_second"]:,} tokens per CPU second. A training that uses 35,000 tokens
        a second needs {facts["share_of_core_35k"]:.0%} of a core for it, one that uses 300,000
        {facts["share_of_core_300k"]:.0%}. CPU seconds per million tokens, each part alone: reading
        {parts["read"]}, tokenising {parts["tokenize"]}, spans {parts["spans"]}; all together
        {parts["all"]}.
    """)


def lineage_block(facts: dict[str, Any]) -> str:
    return _filled(f"""
        `{facts["command"]}` (results/lineage.json): {facts["runs"]} simulated fleets with the real
        loader, {facts["generations"]:,} generations, {facts["launches"]:,} worker launches killed,
        doubled or cut short, {facts["rollbacks"]} rollbacks: of {facts["rows"]:,} rows in the
        lineages of the last globals {facts["repeated"]} are repeated and {facts["skipped"]}
        skipped; {facts["wasted"]:,} more were read in vain.
    """)


def resume_block(facts: dict[str, Any]) -> str:
    same = "the very stream" if facts["identical"] else "NOT the stream"
    return _filled(f"""
        `{facts["command"]}` (results/resume.json): a process that reads Parquet, JSONL, compressed
        JSONL and text in three phases, killed with SIGKILL {facts["kills"]} times at random moments
        and started again with another read-ahead: its {facts["batches"]:,} batches are {same} of a
        process that was never stopped.
    """)


def _filled(text: str) -> str:
    return fill(" ".join(text.split()), WIDTH)
