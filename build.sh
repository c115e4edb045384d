#!/usr/bin/env bash
# Builds mam.pyz: ./build.sh [OUTPUT]          (default: mam.pyz beside this script)
#
# The same mam.py gives the same bytes in every folder, under every umask, file mode, working directory and
# SOURCE_DATE_EPOCH: shiv packs, then the archive is written anew with fixed names, order, times and modes.
# Only another zlib or libbz2 may compress to other bytes, and another Python (3.9 or newer; PYTHON chooses it)
# compiles to others: the archive carries mam's bytecode for the minor version that built it, which halves the first
# start there; elsewhere the first start compiles.
#
# Packages come by hash, once, into .build/; later builds need no network. Builds may run at the same time.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
out=${1:-$here/mam.pyz}
[[ $out = /* ]] || out=$PWD/$out
python=${PYTHON:-python3}
[[ $python != */* || $python = /* ]] || python=$PWD/$python   # a relative path must outlive the cd below
max_bytes=250000        # it is copied to every host that works for mam; this is a budget, not a limit of anything

die() { echo "build.sh: $*" >&2; exit 1; }

for file in mam.py LICENSE; do
    [[ -f $here/$file ]] || die "$here/$file is missing"
done
"$python" -c 'import bz2, sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null \
    || die "needs Python 3.9 or newer, with bz2: set PYTHON"
# Nothing of the caller's Python set-up may reach the build.
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONOPTIMIZE SOURCE_DATE_EPOCH

mkdir -p "$here/.build"
work=$(mktemp -d "$here/.build/work.XXXXXX")
fresh=
trap 'rm -rf "$work"; [[ -z $fresh ]] || rm -f "$fresh"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# ---------------------------------------------------------------------------------------------------------
# 1. Packages. paho-mqtt is shipped; shiv and the click it imports only build. Wheels only: nothing is run.
# ---------------------------------------------------------------------------------------------------------
cat >"$work/shipped.txt" <<'EOF'
paho-mqtt==2.2.0 --hash=sha256:3243630f7c2b05f71d1de8c6f59865eb04d3a59ae8c866e92377faed6753db4d
EOF
cat >"$work/tools.txt" <<'EOF'
shiv==1.0.8 --hash=sha256:a60e4b05a2d2f8b820d567b1d89ee59af731759771c32c282d03c4ceae6aba24
click==8.1.8 --hash=sha256:63c132bbbed01578a06712a2d1f497bb62d9c1c0d329b7903a866228027263b2
EOF

pins=$(cat "$work/shipped.txt" "$work/tools.txt" | "$python" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])')
packages=$here/.build/packages-$pins
if [[ ! -d $packages ]]; then
    echo "build.sh: installing shiv and paho-mqtt" >&2
    # A venv only for its pip; the packages are plain folders, usable by any Python.
    "$python" -m venv "$work/venv"
    for set in shipped tools; do
        "$work/venv/bin/python" -m pip --disable-pip-version-check -qq install --no-deps --require-hashes \
            --only-binary :all: --no-compile --target "$work/packages/$set" --requirement "$work/$set.txt"
    done
    # One rename, so that a build cut short leaves nothing half; another build may have been faster.
    "$python" -c 'import os, sys; os.rename(*sys.argv[1:])' "$work/packages" "$packages" 2>/dev/null \
        || [[ -d $packages ]] || die "cannot create $packages"
fi

# ---------------------------------------------------------------------------------------------------------
# 2. Stage and pack. No dist-info: its files name this folder. The licences in it must travel, so they move
#    into the package.
# ---------------------------------------------------------------------------------------------------------
stage=$work/stage
mkdir "$stage"
cp "$here/mam.py" "$stage/"
cp -R "$packages/shipped/paho" "$stage/"
cp "$packages/shipped"/paho_mqtt-*.dist-info/licenses/{LICENSE.txt,edl-v10} "$stage/paho/"    # of its two, the one we use
find "$stage" -name __pycache__ -prune -exec rm -rf {} +
rm "$stage/paho/mqtt/publish.py" "$stage/paho/mqtt/subscribe.py"     # one-shot helpers that nothing here imports

# -m puts the working directory first on sys.path, so it must hold nothing importable. shiv 1.0.8 calls a
# datetime function that Python 3.12 deprecates, hence -W.
(cd "$work" && PYTHONPATH=$packages/tools "$python" -W ignore::DeprecationWarning -m shiv --site-packages "$stage" \
    --entry-point mam:main --python '/usr/bin/env python3' --reproducible --compressed --output-file "$work/shiv.pyz")

# ---------------------------------------------------------------------------------------------------------
# 3. The launcher, in the place of shiv's bootstrap, which costs 35 ms at each start, shows a traceback where
#    the home is read-only, never mends a damaged cache, and obeys SHIV_INTERPRETER and SHIV_ENTRY_POINT.
#    Two files, because the interpreter compiles __main__.py at each start: what only some starts need is in
#    slow_start.py. Both are ASCII, and __main__.py must parse on Python 2.7, to say there that it needs a newer one.
# ---------------------------------------------------------------------------------------------------------
cat >"$work/__main__.py" <<'EOF'
# Starts mam from a cache of its files, $SHIV_ROOT or ~/.shiv, as shiv's bootstrap would: imported from there
# they keep their .pyc, and the archive may be replaced while mam runs. The cache is only ever a copy: each
# start looks at every file, and slow_start.py writes what is missing. Where there can be no cache, mam runs from
# the archive, slower.
import sys

if sys.version_info < (3, 9):
    sys.stderr.write("mam: needs Python 3.9 or newer, this is %d.%d.%d (%s)\n"
                     % (tuple(sys.version_info[:3]) + (sys.executable or "path unknown",)))
    sys.exit(1)

import gc
import os

BUILD = "@BUILD@"
FOLDERS = @FOLDERS@
SIZES = @SIZES@
ARCHIVE = os.path.realpath(__loader__.archive)
EUID = os.geteuid()


# 0o040000 is a folder, 0o100000 a file. Code that others may write must not run. Root's is no exception: root
# extracts for itself alone (0700), and under another user's HOME must neither run nor leave anything.
def trusted(st, kind):
    return st.st_uid == EUID and st.st_mode & 0o170022 == kind


def cache_folder():
    root = os.environ.get("SHIV_ROOT") or os.path.join(os.environ.get("HOME", "~"), ".shiv")
    return os.path.join(os.path.expanduser(root), "mam_" + BUILD)


def ready(cache):
    try:
        # Who may rename in the folder above could swap ours: it is ours or root's, and sticky, as /tmp is, if
        # others may write there.
        st = os.stat(os.path.dirname(cache))
        if st.st_uid not in (0, EUID) or (st.st_mode & 0o022 and not st.st_mode & 0o1000):
            return False
        for name in FOLDERS:
            if not trusted(os.lstat(cache + name), 0o040000):
                return False
        for name in SIZES:
            st = os.lstat(cache + name)
            if st.st_size != SIZES[name] or not trusted(st, 0o100000):
                return False
    except OSError:
        return False
    # Relative (HOME is empty, or no home is known): it would change with the working directory.
    return os.path.isabs(cache)


def import_cached(cache):
    # In front, so that PYTHONPATH cannot shadow mam or paho; in the place of the archive, if it stands there.
    sys.path[:sys.path[:1] == [__loader__.archive]] = [cache + "/site-packages"]
    # PYTHONDONTWRITEBYTECODE is meant for source trees; here it would cost 60 ms at each start.
    sys.dont_write_bytecode = "--debug" in sys.argv
    if sys.dont_write_bytecode:  # tracebacks need line numbers, which the bytecode lacks: compile
        sys.pycache_prefix = os.devnull
    import mam
    return mam


def load():
    cache = cache_folder()
    damaged = False
    if ready(cache):
        try:
            return import_cached(cache)
        except Exception:
            damaged = True  # in content, not in size: slow_start.py mends, or tells what is wrong
    exec(compile(__loader__.get_data("slow_start.py"), ARCHIVE + "/slow_start.py", "exec"), globals())
    return slow_start(cache, damaged)


try:
    gc.disable()  # compiling or loading a long module makes much and drops nothing: a third of the first start
    mam = load()
    gc.enable()
    mam.SELF_PATH = ARCHIVE  # what mam starts again for its background parts
    status = mam.main()
except KeyboardInterrupt:
    status = 130
sys.exit(status)
EOF

cat >"$work/slow_start.py" <<'EOF'
# The rest of __main__.py, run in its namespace by a start that does not find a good cache.
from importlib.machinery import ModuleSpec

CRC = @CRC@
BYTECODE, BYTECODE_SIZE, BYTECODE_TAG = @BYTECODE@
UNPACKED = {}


def slow_start(cache, damaged):
    # No home, read-only, someone else's, disk full: whatever it is, mam can do without a cache.
    try:
        fill(cache, damaged)
        if damaged:
            drop_bytecode(cache)
        elif ready(cache):
            UNPACKED.clear()  # mam may run for days
            return import_cached(cache)
    except Exception:
        pass
    try:
        sys.meta_path.insert(0, FromMemory())
        import mam
        return mam
    except Exception as error:
        sys.stderr.write("mam: cannot start from %s: %s: %s\n" % (ARCHIVE, type(error).__name__, error))
        sys.exit(70)


# Any number of starts may do this at once, and each may be killed anywhere: a file appears whole, under its
# name, or not at all; a kill leaves one temporary file. Damaged files are replaced, never absent: other
# processes may be importing them.
def fill(cache, everything):
    root = os.path.dirname(cache)
    if not os.path.isabs(root):
        raise OSError("no home")
    if not os.path.isdir(root):
        if os.environ.get("SHIV_ROOT"):
            os.makedirs(root, 0o700, exist_ok=True)
        elif os.stat(os.path.dirname(root)).st_uid == EUID:
            make_folder(root)
    for name in FOLDERS:
        make_folder(cache + name)
        if not trusted(os.lstat(cache + name), 0o040000):
            raise OSError("not ours alone: " + cache + name)
    for name in SIZES:
        if everything or not whole(cache + name, SIZES[name]):
            write(cache + name, unpacked(name))
    # It names the source it was made from by a hash, which Python checks, so it is never stale.
    if BYTECODE_SIZE and sys.implementation.cache_tag == BYTECODE_TAG and not os.path.exists(cache + BYTECODE):
        write(cache + BYTECODE, unpacked(BYTECODE))


def make_folder(path):
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass


def whole(path, size):
    try:
        st = os.lstat(path)
    except OSError:
        return False
    return st.st_size == size and trusted(st, 0o100000)


# Sources and bytecode are one stream, a fifth smaller than each by itself. A tar, so that people can open it too;
# there is a header of 512 bytes before each file, and each is padded to a multiple of that.
def unpacked(name):
    if not UNPACKED:
        from zlib import crc32

        data = __loader__.get_data("site-packages.tar.bz2")
        # The archive may have been replaced since its directory was read, and zipimport does not look at checksums.
        if crc32(data) != CRC:
            raise OSError("site-packages.tar.bz2 is damaged, or was replaced just now")
        try:
            from bz2 import decompress
        except ImportError:
            raise OSError("it needs the module bz2, which this Python (%s) was built without" % sys.executable)
        data = decompress(data)
        start = 512
        for file, size in [(BYTECODE, BYTECODE_SIZE)] * bool(BYTECODE_SIZE) + [*SIZES.items()]:
            UNPACKED[file] = data[start:start + size]
            start += size + -size % 512 + 512
    return UNPACKED[name]


def write(path, data):
    # The pid alone is not unique: containers that share a home have the same ones.
    temporary = "%s.%d.%s" % (path, os.getpid(), os.urandom(4).hex())
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass  # it was never made, or the disk fails: the first error is the one to tell
        raise


# A .pyc torn by a crash of the machine; Python looks only at its header.
def drop_bytecode(cache):
    for name in FOLDERS:
        if name.endswith("/__pycache__"):
            for entry in os.listdir(cache + name):
                os.unlink(os.path.join(cache + name, entry))


# Imports without a cache. zipimport would do, but it compiles every module twice, and fails once the archive
# has been replaced; these sources were all read at the start.
class FromMemory:
    def __init__(self):
        self.sources = {name: unpacked(name) for name in SIZES}

    def find_spec(self, fullname, path=None, target=None):
        stem = "/site-packages/" + fullname.replace(".", "/")
        for name in (stem + "/__init__.py", stem + ".py"):
            if name in self.sources:
                package = name.endswith("/__init__.py")
                spec = ModuleSpec(fullname, self, origin=ARCHIVE + name, loader_state=name, is_package=package)
                spec.has_location = True  # so that the module has a __file__
                return spec
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        spec = module.__spec__
        exec(compile(self.sources[spec.loader_state], spec.origin, "exec", dont_inherit=True), module.__dict__)

    def get_source(self, fullname):  # for the lines in a traceback
        return self.sources[self.find_spec(fullname).loader_state].decode()
EOF

# ---------------------------------------------------------------------------------------------------------
# 4. The archive, written anew beside its place and renamed into it: a mam that runs keeps the file it has.
# ---------------------------------------------------------------------------------------------------------
mkdir -p "$(dirname "$out")"
fresh=$(mktemp "$(dirname "$out")/.mam.pyz.XXXXXX")
PYTHONNODEBUGRANGES=1 "$python" - "$work/shiv.pyz" "$work/__main__.py" "$work/slow_start.py" "$here/LICENSE" "$fresh" \
    "$max_bytes" <<'EOF'
import ast, bz2, hashlib, importlib.util, io, marshal, posixpath, sys, tarfile, tokenize, types, zipfile, zlib

shiv, main, slow, licence, out, max_bytes = sys.argv[1:]

with zipfile.ZipFile(shiv) as archive:
    members = {name: archive.read(name) for name in archive.namelist() if name.startswith("site-packages/")}



def bare(source):
    """The same program without comments, and without docstrings but for those of our commands, which are their help.

    Each line stays where it is, so that a traceback shows it. It is what a reader needs, who reads mam.py itself, and
    a third of the size.
    """
    lines = source.decode().split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source.decode()).readline):
        if token.type == tokenize.COMMENT and token.start[0] > 1:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    for node in ast.walk(ast.parse(source)):
        kinds = (ast.Module, ast.FunctionDef, ast.ClassDef)
        if isinstance(node, kinds) and ast.get_docstring(node, False) and not getattr(node, "name", "").startswith("cmd_"):
            text = node.body[0]
            lines[text.lineno - 1] = "" if isinstance(node, ast.Module) else " " * text.col_offset + "0"
            lines[text.lineno:text.end_lineno] = [""] * (text.end_lineno - text.lineno)
    return "\n".join(lines).encode()


for name in members:
    if name.endswith(".py"):
        members[name] = bare(members[name])
# Only modules are extracted; licence texts stay in the archive.
modules = sorted(name for name in members if name.endswith(".py"))
build = hashlib.sha256()
for name in modules:
    build.update(b"%d %s\n%d\n" % (len(name), name.encode(), len(members[name])) + members[name])

# Relative to the cache folder; a folder comes before what is in it. __pycache__ is made by the launcher too,
# because a .pyc is code as well, and Python would make it with the caller's umask.
folders = {""}
for name in modules:
    folder = posixpath.dirname(name)
    folders.add("/" + folder + "/__pycache__")
    while folder:
        folders.add("/" + folder)
        folder = posixpath.dirname(folder)
# A hash-based .pyc (PEP 552), checked at each import: no time stamp that would differ from build to build.
# Without what nobody reads there and what weighs half of it: column positions (PYTHONNODEBUGRANGES), annotations, and
# line numbers, for only --debug shows tracebacks, and it compiles.
source = members["site-packages/mam.py"]
tree = ast.parse(source, "mam.py")
for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef):
        node.returns = None
    if isinstance(node, ast.arg):
        node.annotation = None
tag = sys.implementation.cache_tag
bytecode = "site-packages/__pycache__/mam.%s.pyc" % tag


def without_lines(code):
    table = "co_linetable" if hasattr(code, "co_linetable") else "co_lnotab"
    inner = [without_lines(value) if isinstance(value, types.CodeType) else value for value in code.co_consts]
    return code.replace(**{table: b"", "co_consts": tuple(inner)})


compiled = importlib.util.MAGIC_NUMBER + (0b11).to_bytes(4, "little") + importlib.util.source_hash(source) \
    + marshal.dumps(without_lines(compile(tree, "mam.py", "exec", dont_inherit=True)))


def packed(files):
    """A .tar.bz2 that depends on nothing but names and contents."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return bz2.compress(file.getvalue())


sources = [(name, members.pop(name)) for name in modules]
values = {
    "@BUILD@": build.hexdigest()[:16],
    "@FOLDERS@": repr(tuple(sorted(folders))),
    "@SIZES@": repr({"/" + name: len(data) for name, data in sources}),
}


def launcher(path):
    with open(path, encoding="ascii") as file:
        source = file.read()
    for mark, value in values.items():
        source = source.replace(mark, value)
    compile(source, path, "exec")
    return source.encode()


def write(brought):
    """With what is brought of bytecode: [(name, content)], or nothing. The size of the archive."""
    stream = packed(brought + sources)        # bytecode beside the source it was made from, in one block of bz2
    values["@BYTECODE@"] = repr(("/" + bytecode, sum(len(data) for _, data in brought), tag))
    values["@CRC@"] = repr(zlib.crc32(stream))
    # Stored: __main__.py, because a start from the cache then need not load zlib, and what is compressed already.
    entries = [("__main__.py", launcher(main), zipfile.ZIP_STORED),
               ("slow_start.py", launcher(slow), zipfile.ZIP_DEFLATED)]
    entries += [(name, members[name], zipfile.ZIP_DEFLATED) for name in sorted(members)]
    entries.append(("site-packages.tar.bz2", stream, zipfile.ZIP_STORED))
    with open(out, "wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w") as archive:
            for name, data, method in entries:
                info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                info.create_system = 3                   # Unix, which gives the mode below its meaning
                info.external_attr = 0o100644 << 16
                info.compress_type = method
                archive.writestr(info, data, compresslevel=9)
        return file.tell()


with open(licence, "rb") as file:
    members["LICENSE"] = file.read()
del members["site-packages/paho/mqtt/py.typed"]     # for type checkers
if write([(bytecode, compiled)]) >= int(max_bytes):
    sys.stderr.write("build.sh: no room for the bytecode: the first start on a host compiles, and takes longer\n")
    write([])
EOF
chmod 755 "$fresh"

# ---------------------------------------------------------------------------------------------------------
# 5. Proof: it starts, from an empty cache and from the filled one.
# ---------------------------------------------------------------------------------------------------------
for try in first second; do
    SHIV_ROOT=$work/root "$python" "$fresh" --version >"$work/version" </dev/null || die "the $try start of the result failed"
done
[[ -d $(echo "$work"/root/mam_*/site-packages) ]] || die "the result did not use its cache"
size=$(wc -c <"$fresh" | tr -d ' ')
((size < max_bytes)) || die "$size bytes: it must stay below $max_bytes"
mv -f "$fresh" "$out"
fresh=
sha256=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$out")
echo "$out  $size bytes  sha256 $sha256  ($(head -n 1 "$work/version"))"
