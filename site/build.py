"""Build the documentation's site: `make site`. Its pages are those of the repository.

    python site/build.py OUTPUT    # writes OUTPUT/VERSION and OUTPUT/index.html, which leads there

The pages keep their places in the repository, so that links between them need no change. A file or
folder that a page links is part of the site, too. The navigation is that of docs/index.md, and the
API reference has the names that `agentrl` exports.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from pages import sections

import agentrl

ROOT = Path(__file__).parents[1]
START = "start.md"
"""The repository's README. MkDocs takes a README for the first page of its folder."""
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def pages() -> list[str]:
    """Return the pages, as paths in the repository."""
    done = subprocess.run(
        ["git", "ls-files", "--", "docs/*.md", "recipes/*.md", "examples/*.md", "benchmarks/*.md",
         "datasets/*.md", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    ours = {page for page in done.stdout.split() if not page.startswith(("agentrl/", "tests/"))}
    return sorted(ours - {"AGENTS.md", "site/index.md"})


def stage(folder: Path) -> None:
    """Copy all pages to a folder, and the files that they link."""
    for page in pages():
        target = folder / (START if page == "README.md" else page)
        write(target, relinked(ROOT / page, folder))
    write(folder / "index.md", relinked(ROOT / "site/index.md", folder, base=ROOT))
    write(folder / "api.md", api_page())
    for name in ("site.css", "site.js"):
        shutil.copy(ROOT / "site" / name, folder)


def write(file: Path, text: str) -> None:
    """Write a file and the folders above it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def relinked(page: Path, folder: Path, base: Path | None = None) -> str:
    """Return the text of a page with the links that the site needs, and stage what they lead to.

    Args:
        page: the page.
        folder: the folder of the staged pages.
        base: where its links begin; by default beside the page.

    Raises:
        SystemExit: a link leads to nothing.
    """
    base = base or page.parent

    def link(match: re.Match[str]) -> str:
        target = (base / match[2]).resolve()
        if not target.exists():
            raise SystemExit(f"{page.relative_to(ROOT)}: {match[2]} does not exist")
        if target.is_dir():
            target /= "README.md"
        inside = target.relative_to(ROOT)
        if inside.as_posix() == "README.md":
            inside = Path(START)
        elif target.suffix != ".md" or inside.parts[0] in ("agentrl", "tests"):
            (folder / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, folder / inside)
        return match[1] + os.path.relpath(ROOT / inside, base).replace(os.sep, "/") + match[3]

    # What looks like a link in code is none.
    parts = re.split(r"(^```.*?^```|`[^`\n]+`)", page.read_text(), flags=re.M | re.S)
    return "".join(p if i % 2 else LINK.sub(link, p) for i, p in enumerate(parts))


def api_page() -> str:
    """Return the page of the names that `agentrl` exports."""
    lines = [
        "# API reference",
        "",
        "These names are exported by `agentrl`. Each is imported when it is first used.",
    ]
    for module, names in agentrl._MODULES.items():
        lines += ["", f"## agentrl.{module}"]
        lines += [f"\n::: agentrl.{module}.{name}" for name in names]
    return "\n".join(lines) + "\n"


def navigation() -> list[object]:
    """Return the navigation: the sections of docs/index.md with their pages."""
    middle = [{title: [f"docs/{file}" for file, _ in pages]} for title, pages in sections().items()]
    last = ["api.md", "recipes/README.md", "benchmarks/README.md", "CHANGELOG.md", "SECURITY.md"]
    first = {"Start": ["index.md", START, "docs/index.md"]}
    return [first, *middle, {"More": [*last, "CONTRIBUTING.md"]}]


def build(output: Path) -> None:
    """Build the site of this version."""
    version = agentrl.__version__
    with tempfile.TemporaryDirectory() as name:
        staged = Path(name) / "pages"
        stage(staged)
        settings = {
            "INHERIT": str(ROOT / "site/mkdocs.yml"),
            "docs_dir": str(staged),
            "site_dir": str(output.absolute() / version),
            "nav": navigation(),
        }
        config = Path(name) / "mkdocs.yml"
        config.write_text(yaml.safe_dump(settings))
        quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-f", config]
        done = subprocess.run(command, env=quiet)
    if done.returncode:
        raise SystemExit(done.returncode)
    known = output / "versions.json"
    older = json.loads(known.read_text()) if known.exists() else []
    entries = [{"version": version, "title": version, "aliases": []}]
    entries += [entry for entry in older if entry["version"] != version]
    known.write_text(json.dumps(entries, indent=1) + "\n")
    there = f'<meta http-equiv="refresh" content="0; url={version}/">'
    (output / "index.html").write_text(f"<!doctype html><title>agentrl</title>{there}\n")
    print(f"{output}/{version}/index.html")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    build(parser.parse_args().output)
