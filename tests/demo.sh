#!/usr/bin/env bash
# A real job from brief to result, without a broker: what `make demo` shows. Ends with the job's exit code.
#
# All happens in a temporary workspace, which is removed at the end with everything in it.
set -euo pipefail
unset MAM_JOB_ID MAM_ATTEMPT_ID MAM_DISPATCH_TOKEN MAM_REGISTRY_DIR MAM_REAL_ROOT MAM_ENV_FILE WORKSPACE_ROOT MQTT_BROKER

pyz=${MAM_PYZ:?"set MAM_PYZ to the built mam.pyz, or run: make demo"}
python=${PYTHON:-python3}
for path in pyz python; do          # relative ones must outlive the cd below
    case ${!path} in /*) ;; */*) printf -v "$path" '%s' "$PWD/${!path}" ;; esac
done
mam() { "$python" "$pyz" "$@"; }

work=$(mktemp -d "${TMPDIR:-/tmp}/mam-demo.XXXXXX")
job=demo-$$
cleanup() {
    # The background parts of the job leave by themselves a moment after its end; give them that moment.
    for _ in $(seq 100); do
        ps -A -o args= | grep -q "[_]\(run\|supervise\) $job" || break
        sleep 0.05
    done
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# mam.pyz unpacks itself into ~/.shiv, which must not stay behind; the interpreter is looked up before, for the
# stand-ins of version managers look into the home.
python=$("$python" -c 'import sys; print(sys.executable)')
unset SHIV_ROOT
export HOME=$work/home
mkdir "$HOME" "$work/project" "$work/project/.git"
cd "$work/project"

if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\e[1m' plain=$'\e[0m'; else bold='' plain=''; fi
step() { printf '\n%s# %s%s\n' "$bold" "$1" "$plain"; }

step "A workspace with something to do, and a brief that says what"
printf 'plum\napple\npear\napple\ncherry\nplum\n' >fruit.txt
cat >brief.md <<'TEXT'
Put the names in fruit.txt into sorted.txt: in order, each of them once.
TEXT
sed 's/^/  brief.md: /' brief.md

step "An agent: here a small script; with a real one it would be 'claude -p' or the like"
cat >agent.sh <<'TEXT'
#!/bin/sh
echo "the brief: $(cat "$MAM_JOB_BRIEF")"
$MAM_PUBLISH_CMD --event progress --detail "read the brief, $(wc -l <fruit.txt | tr -d ' ') names to sort"
sort -u fruit.txt >sorted.txt
$MAM_PUBLISH_CMD --event progress --detail "wrote sorted.txt" --data '{"names": 4}'
echo "$(wc -l <sorted.txt | tr -d ' ') names, the first is $(head -n 1 sorted.txt)"
TEXT
chmod +x agent.sh
sed -n '3,$s/^/  agent.sh: /p' agent.sh

step "Hand it over, and follow it to its end: its events as they come, then the result"
cat <<'TEXT'
$ mam delegate --agent-session exec:demo --exec ./agent.sh --prompt-file brief.md \
      --artifact sorted.txt --validate 'sort -c sorted.txt'
TEXT
code=0
mam delegate --agent-session exec:demo --exec ./agent.sh --prompt-file brief.md --job-id "$job" \
    --artifact sorted.txt --validate 'sort -c sorted.txt' --cancel-on-exit || code=$?
echo "exit code $code"

step "What is going on, which jobs there are, and all that was recorded of this one"
echo '$ mam'
mam
echo '$ mam list'
mam list
echo "\$ mam logs $job --tail 5"
mam logs "$job" --tail 5

exit "$code"
