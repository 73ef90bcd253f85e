"""A stream that survives its client: a second client attaches to the same generation and misses nothing.

Run `forkpoint serve` first, then `python examples/recover_a_stream.py [HOST:PORT]`. Kill the server while it runs and
start it again on the same data folder: the stream goes on by itself.
"""

import asyncio
import sys

from forkpoint.client.client import Client


async def main(address: str) -> None:
    """The whole example."""
    async with Client(address) as client:
        workflow = await client.workflows.create()
        session = await client.sessions.create(workflow.name, seed=1)
        text = b"import os\n\n\ndef size(path):\n"
        generation = session.generate(text=text, max_tokens=80, temperature=0.8, request_id="story")
        async for _ in generation:
            if len(generation.token_ids) >= 20:
                break
        await generation.detach()  # as if this process had died: the generation goes on without it

    async with Client(address) as client:
        # The same call with the same request id is the same generation, from where we were.
        again = client.sessions.open(session.name).generate(
            text=text,
            max_tokens=80,
            temperature=0.8,
            request_id="story",
            resume_position=generation.position,
        )
        await again.result()
        ids = generation.token_ids + again.token_ids
        log = await client.sessions.open(session.name).tokens(len(text)).result()
        print(f"{len(generation.token_ids)} tokens before, {len(again.token_ids)} after,", end=" ")
        print("nothing missing" if ids == log.token_ids else "something is wrong")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50061"))
