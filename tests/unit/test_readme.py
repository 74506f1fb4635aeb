"""The README's examples are true."""

from __future__ import annotations

import re
from pathlib import Path

from extproc.config.check import check

ROOT = Path(__file__).parents[2]


def test_the_two_example_files_pass_the_check_together(tmp_path: Path) -> None:
    clusters, settings = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "envoy").mkdir()
    (tmp_path / "envoy" / "clusters.yaml").write_text(clusters)
    (tmp_path / "extproc.yaml").write_text(settings)
    assert check(tmp_path / "extproc.yaml", ROOT / "envoy" / "envoy.yaml") == []


def test_every_page_it_links_is_there() -> None:
    for name in ("README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))):
        text = (ROOT / name).read_text()
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            if "://" not in link:
                assert ((ROOT / name).parent / link).exists(), f"{name}: {link}"
