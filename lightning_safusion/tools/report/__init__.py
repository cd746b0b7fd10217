"""A self-contained web page of what the callbacks of a run have measured."""

from lightning_safusion.tools.report.page import Run, load_run, render_page, write_report

__all__ = ["Run", "load_run", "render_page", "write_report"]
