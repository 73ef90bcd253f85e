"""A tree of sub-agents with token budgets: several try, the best goes on, and all together stay within what they may.

`python examples/sub_agents.py` starts two nodes of its own; given HOST:PORT, it uses the nodes there. Forks share their
parent's past, so a branch costs what it generates and nothing else; it runs on its parent's node while that has room.
"""

import asyncio
import sys
from dataclasses import dataclass

from cluster import Cluster

from forkpoint.client.client import Client
from forkpoint.client.session import Session

TREE_TOKENS = 150
"""What all branches together may generate."""
BRANCH_TOKENS = 24
"""What one branch may generate in a round."""
BRANCHES, ROUNDS = 3, 3
TASK = b"import os\n\n\ndef total_size(folder):\n"


@dataclass
class Budget:
    """Tokens that the tree may still generate. The orchestrator grants them before a branch starts and takes back what
    the branch did not use, so what is granted at any moment is never more than there is."""

    left: int

    def grant(self, wanted: int) -> int:
        """At most `wanted` tokens, perhaps none."""
        granted = min(wanted, self.left)
        self.left -= granted
        return granted

    def take_back(self, unused: int) -> None:
        """What a branch did not use."""
        self.left += unused


@dataclass
class Attempt:
    """What one branch came to. `score`: the mean log probability of its tokens."""

    session: Session
    text: bytes
    score: float


async def attempt(session: Session, budget: Budget) -> Attempt | None:
    """Let a branch go on for as long as it may; None when the budget has nothing left for it."""
    granted = budget.grant(BRANCH_TOKENS)
    if granted == 0:
        return None  # max_tokens=0 would mean no limit
    said = await session.generate(max_tokens=granted, temperature=0.9, logprobs=True).result()
    budget.take_back(granted - len(said.token_ids))
    return Attempt(session, said.text, sum(said.logprobs) / max(1, len(said.logprobs)))


async def search(client: Client, budget: Budget) -> Session:
    """Fork, let the children try, go on with the best one, until rounds or tokens are over."""
    workflow = await client.workflows.create()
    best = await client.sessions.create(workflow.name, "root", seed=7)
    await best.append(text=TASK)
    for number in range(ROUNDS):
        # Several children get seeds of their own, derived from their parent's: the same tree again, if it is run again.
        children = await best.fork(BRANCHES, session_ids=[f"round-{number}-{name}" for name in "abc"])
        attempts = await asyncio.gather(*(attempt(child, budget) for child in children))
        made = [one for one in attempts if one is not None]
        if not made:
            break
        chosen = max(made, key=lambda one: one.score)
        print(f"round {number}: {len(made)} branches, {chosen.session.name.rpartition('/')[2]} goes on", end="")
        print(f" at {chosen.score:.2f} a token; {budget.left} tokens left")
        for child in children:
            if child is not chosen.session:
                await child.delete()  # hidden, not lost: undelete brings it back
        best = chosen.session
    print(f"the tree generated {TREE_TOKENS - budget.left} tokens of {TREE_TOKENS}")
    async for session in client.sessions.list(workflow.name):
        print(f"{session.name.rpartition('/')[2]}: {session.head} tokens, on {session.node or 'no node'}")
    return best


async def main(addresses: list[str]) -> None:
    """The whole example."""
    async with Client(addresses) as client:
        best = await search(client, Budget(TREE_TOKENS))
        print((await best.tokens().result()).text.decode(errors="replace"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1:]))
    else:
        with Cluster(("a", "b")) as cluster:
            asyncio.run(main(cluster.addresses))
