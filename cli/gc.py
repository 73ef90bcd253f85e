"""`forkpoint gc`: drop checkpoints that nobody needs, and delete what only they had. Asks a server, or works on a store
that no server needs to run on."""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any, Final

from forkpoint.cli.names import short
from forkpoint.cli.output import bytes_text, print_json, print_table
from forkpoint.cli.remote import add_remote, call
from forkpoint.client.client import Client
from forkpoint.clock import SystemClock
from forkpoint.errors import ConfigError
from forkpoint.ids import new_id
from forkpoint.limits import CHECKPOINTS_KEPT_DEFAULT, LADDER_STEP_TOKENS_DEFAULT
from forkpoint.statestore.gc import Collector, CollectorOptions, collected
from forkpoint.statestore.gcreport import CollectionReport
from forkpoint.statestore.open import find_marker, open_blobs, open_catalog
from forkpoint.statestore.retention import RetentionPolicy

Report = dict[str, Any]
_COUNTS: Final = (
    "checkpoints_kept",
    "manifests_kept",
    "manifests_removed",
    "blobs_marked",
    "blobs_waiting",
    "blobs_spared",
    "blobs_deleted",
    "bytes_deleted",
    "blobs_evicted",
    "bytes_evicted",
    "bytes_over_budget",
)


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `gc`."""
    parser = verbs.add_parser(
        "gc",
        help="drop checkpoints that nobody needs, and what only they had",
        epilog="Without --catalog and --blobs a running server does it, by its own settings. With them the store is "
        "opened here, which is safe beside servers that use it: one collects a tier at a time.",
    )
    add_remote(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument("--catalog", metavar="URL", help="sqlite:///path or redis://host: work on the store itself")
    parser.add_argument("--blobs", metavar="URL", help="file:///path, redis://host, or tiers as in `forkpoint serve`")
    parser.add_argument("--keep-last", type=int, default=CHECKPOINTS_KEPT_DEFAULT, metavar="N", help="see `serve`")
    parser.add_argument("--ladder-step", type=int, default=LADDER_STEP_TOKENS_DEFAULT, metavar="N", help="see `serve`")
    parser.add_argument("--budget-bytes", type=int, default=0, metavar="N", help="see `serve`")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Collect and print what was done, one row a tier; 1 when something stood in the way."""
    if arguments.catalog is None and arguments.blobs is None:
        return call(arguments, _ask)
    if arguments.catalog is None or arguments.blobs is None:
        raise ConfigError("--catalog, --blobs", "command line", "they go together")
    try:
        policy = RetentionPolicy(arguments.keep_last, arguments.ladder_step)
    except ValueError as error:
        raise ConfigError("--keep-last, --ladder-step", "command line", str(error)) from error
    options = CollectorOptions(policy, grace_seconds=0, budget_bytes=max(0, arguments.budget_bytes))
    reports = asyncio.run(_collect(arguments.catalog, arguments.blobs, options, arguments.dry_run))
    return _show(reports, arguments)


async def _ask(client: Client, arguments: argparse.Namespace) -> int:
    events = [event async for event in client.garbage.collect(dry_run=arguments.dry_run) if event.done]
    return _show([_of_event(event) for event in events], arguments)


async def _collect(catalog_url: str, blobs_url: str, options: CollectorOptions, dry_run: bool) -> list[Report]:
    """On the store itself. No grace: a blob that a running server has just stored would be stored again."""
    marker = await find_marker(catalog_url)
    if marker is None:
        raise ConfigError("--catalog", "command line", f"there is no store at {catalog_url}")
    catalog, clock, holder = open_catalog(catalog_url), SystemClock(), f"{new_id('gc')}-{os.getpid()}"
    blobs = open_blobs(blobs_url)
    try:
        await catalog.open(marker)
        await blobs.open()
        reports: list[Report] = []
        for tier, rules in collected(blobs, options):
            collector = Collector(catalog, tier, rules, clock, holder)
            try:
                reports.append(await _last(collector.collect(dry_run)))
            finally:
                await collector.election.resign()
        return reports
    finally:
        await catalog.close()
        await blobs.close()


async def _last(reports: AsyncIterator[CollectionReport]) -> Report:
    *_, report = [report async for report in reports]
    counts = {name: getattr(report, name) for name in _COUNTS}
    return {
        "tier": report.tier,
        "stopped": report.stopped,
        **counts,
        "checkpoints_dropped": {reason.value: count for reason, count in report.checkpoints_dropped.items()},
        "dropped": [
            {"name": f"{verdict.row.session}/checkpoints/{verdict.row.checkpoint}", "reason": verdict.reason.value}
            for verdict in report.dropped
        ],
    }


def _of_event(event: Any) -> Report:
    return {
        "tier": event.tier,
        "stopped": event.stopped,
        **{name: getattr(event, name) for name in _COUNTS},
        "checkpoints_dropped": dict(event.checkpoints_dropped),
        "dropped": [{"name": one.name, "reason": one.reason} for one in event.dropped],
    }


def _show(reports: list[Report], arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json({"dry_run": arguments.dry_run, "tiers": reports})
    else:
        for report in reports:
            _print(report, arguments.dry_run)
    return 1 if any(report["stopped"] for report in reports) else 0


def _print(report: Report, dry_run: bool) -> None:
    if report["dropped"]:
        print_table(("checkpoint", "why"), [(short(one["name"]), one["reason"]) for one in report["dropped"]])
    dropped = sum(report["checkpoints_dropped"].values())
    would = "would be " if dry_run else ""
    print(
        f"tier {report['tier'][:8]}: {dropped:,} checkpoints {would}dropped, {report['checkpoints_kept']:,} stay; "
        f"{report['blobs_deleted']:,} blobs, {bytes_text(report['bytes_deleted'])}, {would}deleted"
        + (f", {report['blobs_waiting']:,} wait" if report["blobs_waiting"] else "")
    )
    if report["bytes_over_budget"]:
        print(f"{bytes_text(report['bytes_over_budget'])} are beyond the budget, and nothing more may be dropped")
    if report["stopped"]:
        print(f"no blob was deleted: {report['stopped']}; `forkpoint check` says more")
