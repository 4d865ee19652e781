"""``sluice reproduce selection``: run the cells of the study that have no result, show and write the table."""

from __future__ import annotations

import typer

from sluice.cli.output import print_json, print_table
from sluice.cli.reproduce_cells import check_flags, finish_cells, numbers_of, print_files, words_of
from sluice.cli.reproduce_options import SelectionOptions
from sluice.experiments.tables.inclusion import inclusion_markdown, run_inclusion, stored_inclusion
from sluice.experiments.tables.selection import selection_lines, stored_lines, write_selection
from sluice.experiments.tables.selection_cells import ARMS, plan_selection
from sluice.experiments.tables.selection_texts import COLUMNS, block_title, blocks, cells_of


def reproduce_selection(options: SelectionOptions) -> None:
    """Run the command."""
    check_flags(options.cells)
    datasets, epsilons = words_of(options.datasets), numbers_of("epsilons", options.epsilons, float)
    plan = plan_selection(
        datasets=datasets,
        epsilons=epsilons,
        arms=words_of(options.arms) or list(ARMS),
        regimes=words_of(options.regimes),
        seeds=numbers_of("seeds", options.seeds, int),
    )
    finished = finish_cells(plan, options.cells, results=options.results, cache="selection")
    if options.inclusion and not options.cells.no_run:
        for dataset in datasets:
            for epsilon in epsilons:
                run_inclusion(options.results, dataset, epsilon, data_dir=options.cells.data_dir)
    # Every cell that is stored, of this command or an earlier one.
    lines = selection_lines(stored_lines(options.results))
    inclusion = inclusion_markdown(stored_inclusion(options.results))
    files = write_selection(lines, options.results, inclusion=inclusion)
    if options.cells.as_json:
        print_json(
            {
                "lines": [line.as_dict() for line in lines],
                "failed": finished.failed,
                "files": {kind: str(path) for kind, path in files.items()},
            }
        )
    else:
        for key, members in blocks(lines):
            print_table(COLUMNS, map(cells_of, members), title=block_title(*key))
            typer.echo()
        print_files(files)
    if finished.failures:
        raise typer.Exit(1)
