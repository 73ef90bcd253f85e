"""`forkpoint check`: everything that is wrong with a store. Reads only; no server is needed."""

import argparse
import asyncio
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

from forkpoint.cli.output import print_json, print_table
from forkpoint.errors import ConfigError
from forkpoint.statestore.check import Finding, Severity, check
from forkpoint.statestore.open import find_marker, open_blobs, open_catalog, shown_url


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `check`."""
    parser = verbs.add_parser("check", help="verify a whole store: logs, hash chains, manifests, blobs")
    parser.add_argument("--catalog", required=True, metavar="URL", help="sqlite:///path or redis://host")
    parser.add_argument("--blobs", required=True, metavar="URL", help="file:///path")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 when any is an error, else 0."""
    findings = asyncio.run(_findings(arguments.catalog, arguments.blobs))
    counts = Counter(finding.severity for finding in findings)
    if arguments.json:
        print_json(
            {
                "errors": counts[Severity.ERROR],
                "warnings": counts[Severity.WARNING],
                "findings": [
                    {"severity": f.severity.value, "kind": f.kind, "where": f.where, "detail": f.detail}
                    for f in findings
                ],
            }
        )
    else:
        if findings:
            rows = [(f.severity.value.lower(), f.kind, f.where, f.detail) for f in findings]
            print_table(["", "kind", "where", "what is wrong"], rows)
        print(f"{counts[Severity.ERROR]} errors, {counts[Severity.WARNING]} warnings")
    return 1 if counts[Severity.ERROR] else 0


async def _findings(catalog_url: str, blobs_url: str) -> list[Finding]:
    marker = await find_marker(catalog_url)
    if marker is None:
        raise ConfigError("--catalog", "command line", f"there is no store at {shown_url(catalog_url)}")
    folder = urlsplit(blobs_url)
    if folder.scheme == "file" and not Path(unquote(folder.path)).is_dir():
        raise ConfigError("--blobs", "command line", f"there is no folder at {blobs_url}")
    blobs = open_blobs(blobs_url)
    try:
        catalog = open_catalog(catalog_url)
        try:
            await catalog.open(marker)
            return [finding async for finding in check(catalog, blobs)]
        finally:
            await catalog.close()
    finally:
        await blobs.close()
