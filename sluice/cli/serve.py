"""``sluice serve``: the planner page."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer


def serve(
    port: Annotated[int, typer.Option("--port", help="Port on the loopback address; 0: any that is free.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Plan a run in the browser: move sliders and see epsilon and noise at once.

    The page is served to this machine only and computed by the library. It ends with Ctrl-C.

    Example: sluice serve --port 8000
    """
    from sluice.planner.server import PlannerServer

    with PlannerServer(port=port) as server:
        typer.echo(f"The planner is at {server.url} (Ctrl-C ends it).")
        if browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo()
