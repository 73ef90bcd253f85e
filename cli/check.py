"""`forkpoint check`: everything that is wrong with a store; --repair mends what can be mended. Needs no server."""

import argparse
import asyncio
from collections import Counter
from collections.abc import Sequence

from forkpoint.cli.output import print_json, print_table
from forkpoint.errors import ConfigError
from forkpoint.statestore.check import Finding, Repaired, Severity, check, repair
from forkpoint.statestore.open import blob_folders, find_marker, open_blobs, open_catalog, shown_url


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `check`."""
    parser = verbs.add_parser("check", help="verify a whole store: logs, hash chains, manifests, blobs")
    parser.add_argument("--catalog", required=True, metavar="URL", help="sqlite:///path or redis://host")
    parser.add_argument(
        "--blobs",
        required=True,
        action="append",
        metavar="URL",
        help="file:///path or redis://host; once for each tier, the fastest first",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument(
        "--repair", action="store_true", help="mend what can be mended without a risk; deletes no blob and no token"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 when any is an error that was not mended, else 0."""
    results = asyncio.run(_results(arguments.catalog, " ".join(arguments.blobs), arguments.repair))
    left = [result.finding for result in results if not result.done]
    counts = Counter(finding.severity for finding in left)
    mended = len(results) - len(left)
    if arguments.json:
        document: dict[str, object] = {"errors": counts[Severity.ERROR], "warnings": counts[Severity.WARNING]}
        if arguments.repair:
            document["repaired"] = mended
        document["findings"] = [_as_json(result, arguments.repair) for result in results]
        print_json(document)
    else:
        _print_findings(results, arguments.repair)
        repaired = f", {mended} repaired" if arguments.repair else ""
        print(f"{counts[Severity.ERROR]} errors, {counts[Severity.WARNING]} warnings{repaired}")
    return 1 if counts[Severity.ERROR] else 0


def _as_json(result: Repaired, repaired: bool) -> dict[str, object]:
    finding = result.finding
    fields: dict[str, object] = {
        "severity": finding.severity.value,
        "kind": finding.kind,
        "where": finding.where,
        "detail": finding.detail,
    }
    return {**fields, "repaired": result.done, "repair": result.what} if repaired else fields


def _print_findings(results: Sequence[Repaired], repaired: bool) -> None:
    if not results:
        return
    columns = ["", "kind", "where", "what is wrong"]
    rows = [(r.finding.severity.value.lower(), r.finding.kind, r.finding.where, r.finding.detail) for r in results]
    if repaired:
        columns.append("repair")
        more = [f"done: {result.what}" if result.done else f"not done: {result.what}" for result in results]
        print_table(columns, [(*row, what) for row, what in zip(rows, more, strict=True)])
    else:
        print_table(columns, rows)


async def _results(catalog_url: str, blobs_setting: str, mend: bool) -> list[Repaired]:
    """All findings; not done, and nothing said, unless they are to be mended."""
    marker = await find_marker(catalog_url)
    if marker is None:
        raise ConfigError("--catalog", "command line", f"there is no store at {shown_url(catalog_url)}")
    for folder in blob_folders(blobs_setting):
        if not folder.is_dir():
            raise ConfigError("--blobs", "command line", f"there is no folder {folder}")
    blobs = open_blobs(blobs_setting, marker.namespace)
    try:
        catalog = open_catalog(catalog_url)
        try:
            await catalog.open(marker)
            await blobs.open()
            findings: list[Finding] = [finding async for finding in check(catalog, blobs)]
            if mend:
                return [result async for result in repair(catalog, blobs, findings)]
            return [Repaired(finding, False, "") for finding in findings]
        finally:
            await catalog.close()
    finally:
        await blobs.close()
