#!/usr/bin/env bash
# Runs FOLDER/recipe.json under compose to its end, and copies the run's folder `run` into FOLDER.
#
#   benchmarks/compose_run.sh FOLDER
#
# The variables are those of deploy/compose/smoke.sh. FOLDER is the workspace of the containers: the recipe's paths are
# relative to it.
set -euo pipefail
folder=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. deploy/compose/project.sh
export TANDEM_RECIPE=recipe.json

cp -r "$folder" "$TANDEM_WORKSPACE"
chown -R "$TANDEM_USER" "$TANDEM_WORKSPACE"
init
up
within 1500 "the run has ended" test -e "$TANDEM_WORKSPACE/run/summary.json"
cp -r "$TANDEM_WORKSPACE/run" "$folder/run"
