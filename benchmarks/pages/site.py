"""Hook of `mkdocs build`: beside every page its Markdown, and `llms.txt`, which lists them (llmstxt.org)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def on_nav(nav: Any, config: Any, files: Any) -> None:
    """Keep the order of the navigation for `on_post_build`."""
    config.extra["llms"] = list(nav.pages)


def on_post_build(config: Any) -> None:
    """Copy the pages' sources as they are, and write the list."""
    site, section = Path(config.site_dir), ""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for page in config.extra["llms"]:
        if (here := page.parent.title if page.parent else "Start") != section:
            section = here
            lines += ["", f"## {section}", ""]
        lines.append(f"- [{page.title}]({page.file.src_uri})")
        (site / page.file.src_uri).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page.file.abs_src_path, site / page.file.src_uri)
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
