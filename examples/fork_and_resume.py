"""Fork a session, ask both branches something else, move one out of memory and back.

Run `forkpoint serve` first, then `python examples/fork_and_resume.py [HOST:PORT]`.
"""

import asyncio
import sys

from forkpoint.client.client import Client
from forkpoint.client.session import Session


async def ask(session: Session, text: str) -> str:
    """One turn: the user's text, then what the model says."""
    generation = session.generate(messages=[("user", text)], add_generation_prompt=True, max_tokens=32)
    await generation.result()
    return generation.text.decode()


async def main(address: str) -> None:
    """The whole example."""
    async with Client(address) as client:
        workflow = await client.workflows.create()
        session = await client.sessions.create(workflow.name, seed=1)
        await ask(session, "memo harbour = k4m2zx")

        # Two futures of one past. Neither sees what the other says.
        left, right = await session.fork(2)
        await ask(left, "memo harbour = p7q9aa")
        answers = await asyncio.gather(ask(left, "recall harbour"), ask(right, "recall harbour"))
        print("left says", answers[0], "and right says", answers[1])

        # Out of the node's memory, and back: on this server, or on any other with the same store.
        await left.pause()
        resumed = await left.resume()
        print(f"{resumed.restored_tokens} tokens restored, {resumed.replayed_tokens} replayed, exact: {resumed.exact}")
        print("left still says", await ask(left, "recall harbour"))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50061"))
