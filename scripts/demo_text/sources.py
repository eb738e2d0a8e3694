"""Where the demo model's text comes from: Debian packages of permissively licensed documentation, by name."""

import dataclasses
import gzip
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Source:
    """One Debian package.

    Attributes:
      package: Its name.
      licence: The licence of the files that `include` selects, as the package's copyright file states it.
      include: Regular expression, searched in the path of a file inside the package ("usr/share/doc/...").
      exclude: Regular expression of paths to leave out again ("": none): indices, change logs, API listings.
      held_out: Whether every document of the package is kept from training.
    """

    package: str
    licence: str
    include: str
    exclude: str = ""
    held_out: bool = False

    def selects(self, path: str) -> bool:
        """Whether the file at `path` is text of this source."""
        if _NEVER.search(path) or (self.exclude and re.search(self.exclude, path)):
            return False
        return re.search(self.include, path) is not None


_NEVER = re.compile(
    r"/(_sources|_modules|_static|search|genindex|py-modindex|modindex|http-routingtable|http-modindex|copyright|license"
    r"|contents|objects|bookindex|toc|print|glossary-index)(\.html|/|$)|-index\.html|genindex"
)
_OPENSTACK = (
    r"html/(admin|install|user|contributor|reference|cli|developing_guides|template_guide|getting_started"
    r"|configuration)/.*\.html$"
)
_OPENSTACK_API = (
    r"/(api|samples?|policies)/|(config|sample|policy|policies|options|config-options)\.html$|release-?notes"
)

SOURCES: tuple[Source, ...] = (
    Source(
        "python3.11-doc",
        "PSF-2.0",
        r"html/(tutorial|howto|reference|library|faq|extending|c-api|whatsnew|using|installing|distributing)/.*\.html$",
        r"whatsnew/changelog",
    ),
    Source(
        "postgresql-doc-15", "PostgreSQL", r"html/.*\.html$", r"html/(release-|biblio|features-|errcodes|sql-keywords)"
    ),
    Source(
        "rust-doc",
        "MIT or Apache-2.0",
        r"html/(book|reference|nomicon|cargo|rustc|rustdoc|edition-guide|rust-by-example|embedded-book|unstable-book"
        r"|error_codes|std/[a-z_]+/index|std/(index|keyword\.|primitive\.|macro\.)|std/[a-z_]+/(trait|struct|enum)\.)"
        r".*(?<!print)\.html$",
        r"book/(first|second|2018)-edition|rust-by-example/.*/print|library-features|html/std/(arch|simd)/",
    ),
    Source("perl-doc", "Artistic", r"\.pod$", r"perl5\d*delta|perltoc|perlapi\.|perlunicook"),
    Source("jargon-text", "public domain", r"jargon.*\.txt(\.gz)?$"),
    Source(
        "apache2-doc",
        "Apache-2.0",
        r"manual/en/.*\.html(\.en)?$",
        r"/(directives|quickreference|sitemap|index)\.html|license",
    ),
    Source(
        "python-django-doc",
        "BSD-3-Clause",
        r"html/(topics|howto|intro|misc|internals|faq|releases|ref)/.*\.html$",
        r"releases/(security|index)",
    ),
    Source(
        "python-sqlalchemy-doc",
        "MIT",
        r"html/(orm|core|tutorial|faq|dialects|errors|glossary|changelog/migration)",
        r"changelog/changelog",
    ),
    Source(
        "cmake-doc", "BSD-3-Clause", r"html/(manual|command|policy|guide|prop_tgt|variable|module|cpack_gen)/.*\.html$"
    ),
    Source("llvm-14-doc", "Apache-2.0 with LLVM exception", r"html/.*\.html$", r"AMDGPU/|/AMDGPU"),
    Source("clang-14-doc", "Apache-2.0 with LLVM exception", r"html/.*\.html$", r"DiagnosticsReference|ASTMatchers"),
    Source(
        "erlang-doc",
        "Apache-2.0",
        r"doc/(html/)?(reference_manual|design_principles|efficiency_guide|programming_examples|getting_started|tutorial"
        r"|oam|installation_guide|embedded|system_principles|system_architecture_intro)/.*\.html$|chapter.*\.html$"
        r"|_guide\.html$|/(kernel|stdlib|erts)[^/]*/doc/.*\.html$",
        r"lib/(wx|jinterface|megaco|diameter|snmp)|notes\.html|/src/",
    ),
    Source("nodejs-doc", "MIT", r"api/.*\.html$", r"/all\.html"),
    Source(
        "krb5-doc",
        "MIT",
        r"krb5-doc/(admin|user|plugindev|basic|formats|appdev/[^/]*\.html|build|about|mitK5)",
        r"appdev/refs",
    ),
    Source("varnish-doc", "BSD-2-Clause", r"html/.*\.html$"),
    Source("sphinx-doc", "BSD-2-Clause", r"html/.*\.html$", r"changes"),
    Source("docutils-doc", "public domain", r"docs/(user|dev|ref|howto|peps)/.*\.html$"),
    Source(
        "python-sklearn-doc",
        "BSD-3-Clause",
        r"html/(modules/[^/]*|tutorial/.*|developers/.*|whats_new/.*|common_pitfalls|computing/.*|auto_examples/.*)\.html$",
    ),
    Source("golang-1.19-doc", "BSD-3-Clause", r"\.html$"),
    Source("twisted-doc", "MIT", r"html/(core|web|names|words|pair|mail|conch|trial|historic)/.*\.html$"),
    Source("nova-doc", "Apache-2.0", _OPENSTACK, _OPENSTACK_API),
    Source("neutron-doc", "Apache-2.0", _OPENSTACK, _OPENSTACK_API),
    Source("keystone-doc", "Apache-2.0", _OPENSTACK, _OPENSTACK_API),
    Source("cinder-doc", "Apache-2.0", _OPENSTACK, _OPENSTACK_API),
    Source("ironic-doc", "Apache-2.0", _OPENSTACK, _OPENSTACK_API),
    Source("glance-doc", "Apache-2.0", _OPENSTACK, _OPENSTACK_API),
    Source("heat-doc", "Apache-2.0", _OPENSTACK, _OPENSTACK_API),
    Source("swift-doc", "Apache-2.0", r"base/.*\.html$", r"/api/"),
    Source("libboost1.74-doc", "BSL-1.0", r"\.html?$", r"html/boost/|/reference|_hpp|header"),
    Source("xorg-docs", "MIT", r"\.(html|txt)(\.gz)?$"),
    Source("python-pytest-doc", "MIT", r"html/.*\.html$", r"announce|changelog"),
    Source("python-setuptools-doc", "MIT", r"html/.*\.html$", r"history"),
    Source("python-cryptography-doc", "Apache-2.0", r"html/.*\.html$", r"changelog"),
    Source("dpdk-doc", "BSD-3-Clause", r"guides/.*\.html$"),
    Source("python-ipython-doc", "BSD-3-Clause", r"html/.*\.html$", r"/api/|github-stats"),
    Source("zsh-doc", "MIT", r"zsh-common/html/.*\.html$", r"-Index|_index"),
    Source("ghc-doc", "BSD-3-Clause", r"html/users_guide/.*\.html$"),
    Source("python-werkzeug-doc", "BSD-3-Clause", r"html/.*\.html$", r"changes"),
    Source(
        "python-astropy-doc",
        "BSD-3-Clause",
        r"html/(?!api/|generated/).*\.html$",
        r"changelog|whatsnew|/api/|/generated/|_modules",
    ),
    Source(
        "sqlite3-doc",
        "public domain",
        r"sqlite3/[^/]*\.html$",
        r"changes|keyword_index|doclist|sitemap|capi3ref|/toc_db",
        held_out=True,
    ),
)


def download(folder: Path) -> None:
    """Fetches every package of `SOURCES` into `folder` with `apt-get download`; nothing is installed.

    Raises:
      RuntimeError: There is no apt-get, or it failed; `apt-get update` first may help.
    """
    if not shutil.which("apt-get"):
        raise RuntimeError("apt-get is not here: fetch on a Debian machine and bring the folder data/demo")
    folder.mkdir(parents=True, exist_ok=True)
    missing = [source.package for source in SOURCES if not list(folder.glob(f"{source.package}_*.deb"))]
    if not missing:
        return
    result = subprocess.run(["apt-get", "download", *missing], cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"apt-get download failed (run apt-get update first?): {result.stderr.strip()[-500:]}")


def find_package(folder: Path, package: str) -> Path:
    """The package's file in `folder`, the newest if there are several.

    Raises:
      FileNotFoundError: It is not there.
    """
    found = sorted(folder.glob(f"{package}_*.deb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"{package}: no {package}_*.deb in {folder}; run scripts/prepare_demo_data --install")
    return found[-1]


def version(package_file: Path) -> str:
    """The version field of a .deb file."""
    field = subprocess.run(["dpkg-deb", "-f", str(package_file), "Version"], capture_output=True, text=True, check=True)
    return field.stdout.strip()


def read_package(source: Source, package_file: Path) -> Iterator[tuple[str, str]]:
    """Yields (path, text) of the selected files of a .deb, sorted by nothing but the archive's order.

    The archive is streamed: nothing is unpacked to disk. A file that is not UTF-8 is read as Latin-1.

    Raises:
      RuntimeError: dpkg-deb could not read the package.
    """
    unpack = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package_file)], stdout=subprocess.PIPE)
    try:
        with unpack, tarfile.open(fileobj=unpack.stdout, mode="r|") as archive:
            for member in archive:
                path = member.name.removeprefix("./")
                if not member.isfile() or not source.selects(path):
                    continue
                stream = archive.extractfile(member)
                content = stream.read() if stream else b""
                if path.endswith(".gz"):
                    content = gzip.decompress(content)
                yield path, _decode(content)
            if unpack.stdout:
                unpack.stdout.read()  # the archive's padding: dpkg-deb must not find the pipe closed
    except tarfile.TarError as error:
        raise RuntimeError(f"{package_file} cannot be read: {error}") from error
    if unpack.returncode:
        raise RuntimeError(f"{package_file} cannot be read: dpkg-deb exited with {unpack.returncode}")


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")
