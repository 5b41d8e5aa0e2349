"""`fedgma flower`: a Flower run whose processes are restarted when they fail."""

from pathlib import Path
from typing import Annotated

import typer

from fedgma.cli.runs import Json

app = typer.Typer(no_args_is_help=True, help="Run on Flower's engine.")


@app.callback()
def root() -> None:
    """Run on Flower's engine."""


@app.command()
def up(
    folder: Annotated[Path, typer.Argument(metavar="APP", help="Folder of the Flower app.")],
    state: Annotated[Path, typer.Option(help="Folder for checkpoints, logs and Flower's own files.")] = Path(
        "flower-run"
    ),
    certificates: Annotated[Path | None, typer.Option(help="Folder with ca.crt, server.pem and server.key.")] = None,
    keys: Annotated[Path | None, typer.Option(help="Folder with a public key for every node that may join.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No encryption; for one machine only.")] = False,
    host: Annotated[str, typer.Option(help="Address on which the SuperLink listens for nodes.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=1,
            max=65535,
            help="Port for nodes; control requests take the next one, nodes started here those after it.",
        ),
    ] = 8000,
    nodes: Annotated[int, typer.Option(min=0, help="Nodes to start on this machine too.")] = 0,
    run_config: Annotated[list[str] | None, typer.Option("--run-config", "-c", help="Settings of the app.")] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Restarts, also of a node, without a completed round before it gives up.")
    ] = 5,
) -> None:
    """Start a SuperLink, run an app on it, and restart every process that dies until the run is done.

    The app must have `state` in its config and pass it on as `Masked(...).start(..., folder=...)`: it then resumes from
    its last checkpoint. The same command resumes a run that was stopped. Nothing outlives this command, and only nodes
    are served beyond this machine.
    """
    from fedgma.cli.signals import obeying_signals
    from fedgma.flower.deployment import Deployment
    from fedgma.flower.supervisor import Supervisor

    plan = Deployment(
        folder.resolve(),
        state.resolve(),
        host,
        port,
        certificates=certificates and certificates.resolve(),
        keys=keys and keys.resolve(),
        insecure=insecure,
        nodes=nodes,
        run_config=tuple(run_config or ()),
    )
    with obeying_signals() as stopping:
        code = Supervisor(plan, restarts=restarts, say=_say, stopping=stopping).run()
    raise typer.Exit(code if stopping.code is None else stopping.code)


@app.command()
def status(
    state: Annotated[Path, typer.Option(help="State folder of `fedgma flower up`.")] = Path("flower-run"),
    as_json: Json = False,
) -> None:
    """Say what a deployment is doing: rounds, processes, nodes, disk, logs; exit code 1 if it neither runs nor is done.

    Everything is read from the state folder on this machine. Nothing is started, asked or changed.
    """
    import json

    from fedgma.flower.status import in_words, status_of

    found = status_of(state.resolve())
    typer.echo(json.dumps(found._asdict()) if as_json else "\n".join(in_words(found)))
    raise typer.Exit(0 if found.is_well else 1)


def _say(text: str) -> None:
    import time

    typer.echo(f"{time.strftime('%H:%M:%S')} {text}")
