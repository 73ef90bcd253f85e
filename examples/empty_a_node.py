"""Moving everything off a node while clients read: for an upgrade, or because the machine is needed elsewhere.

`python examples/empty_a_node.py` starts three nodes of its own. It drains one of them in the middle of several
generations and then stops it. The streams pause for about a step and go on; nothing comes twice or is left out.
"""

import asyncio

from cluster import Cluster

from forkpoint.client.client import Client
from forkpoint.client.generation import Generation

SESSIONS = 3
TOKENS = 64
LEAVING = "a"


async def follow(generation: Generation, begun: asyncio.Event) -> float:
    """Read a generation to its end; returns the longest time without a token, in seconds."""
    loop, longest = asyncio.get_running_loop(), 0.0
    heard = None
    async for _ in generation:
        now = loop.time()
        longest, heard = max(longest, now - (heard or now)), now
        begun.set()
    return longest


async def main() -> None:
    """The whole example."""
    with Cluster() as cluster:
        # Direct calls are served where they are sent: so all sessions begin on one node.
        async with Client(cluster.address(LEAVING), direct=True) as there, Client(cluster.addresses) as client:
            await client.workflows.create("work")
            generations, begun = [], []
            for number in range(SESSIONS):
                session = await there.sessions.create("work", f"agent-{number}", seed=number)
                await session.append(text=b"import os\n\n\ndef total_size(folder):\n")
                generations.append(client.sessions.open(session.name).generate(max_tokens=TOKENS, temperature=0.8))
                begun.append(asyncio.Event())
            async with asyncio.TaskGroup() as group:
                readers = [group.create_task(follow(*pair)) for pair in zip(generations, begun, strict=True)]
                for event in begun:
                    await event.wait()
                drained = await client.nodes.drain(LEAVING).result()
                print(f"{drained.sessions_moved} moved off {LEAVING}, {drained.sessions_parked} parked,", end=" ")
                print(f"{drained.sessions_left} left")
                status = await asyncio.to_thread(cluster.stop, LEAVING)
                print(f"{LEAVING} stopped with status {status}")
            print(f"the longest time without a token: {max(reader.result() for reader in readers):.2f} s")
            whole = True
            for generation in generations:
                log = await client.sessions.open(generation.request.name).tokens().result()
                whole &= log.token_ids[-TOKENS:] == generation.token_ids
            print(f"every stream is what its log says: {whole}")
            async for node in client.nodes.list():
                print(f"{node.name.removeprefix('nodes/')}: {node.sessions} sessions")


if __name__ == "__main__":
    asyncio.run(main())
