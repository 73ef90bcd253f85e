"""A background agent that outlives the machine it runs on: its session has a hot standby, and its node is killed.

`python examples/background_agent.py` starts two nodes of its own, and uses the blocking client. The agent needs nobody
who listens to it: whoever knows its request id attaches, reads from any position, and leaves again.
"""

from cluster import Cluster

from forkpoint.client.sync import Client, Generation, Session

TASK = b"import os\n\n\ndef total_size(folder):\n"
TOKENS = 96


def job(session: Session) -> Generation:
    """The agent's work, always the same call: whoever makes it first starts it, everyone else attaches to it."""
    return session.generate(max_tokens=TOKENS, temperature=0.8, request_id=f"job of {session.name}")


def hire(client: Client, session_id: str, standbys: int) -> Session:
    """A session that knows its task."""
    session = client.sessions.create("agents", session_id, seed=7, standbys=standbys)
    session.append(text=TASK)
    return session


def wait_for_standby(client: Client) -> None:
    """Return once some node follows a session of another one."""
    with client.nodes.watch() as events:
        for event in events:
            if event.node.following:
                return


def node_of(session: Session) -> str:
    """The id of the node that has the session."""
    return session.get().node.removeprefix("nodes/")


def main() -> None:
    """The whole example."""
    with Cluster(("a", "b")) as cluster, Client(cluster.addresses) as client:
        client.workflows.create("agents")
        agent = hire(client, "with-standby", standbys=1)
        wait_for_standby(client)
        begun = job(agent)
        next(begun)
        begun.detach()  # from here on nobody listens

        victim = node_of(agent)
        print(f"the agent runs on {victim}, with a standby elsewhere; kill -9 {victim} at {agent.get().head} tokens")
        cluster.kill(victim)
        finished = job(agent).result()
        print(f"{node_of(agent)} took over and finished it: {len(finished.token_ids)} tokens")

        twin = job(hire(client, "undisturbed", standbys=0)).result()
        print(f"the same tokens as of an agent that nobody disturbed: {twin.token_ids == finished.token_ids}")


if __name__ == "__main__":
    main()
