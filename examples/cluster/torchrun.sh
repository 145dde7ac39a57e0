#!/usr/bin/env bash
# Runs a program on several hosts. Start it on each of them, with the same variables and arguments, in the same checkout:
#
#     HEAD=host0 HOSTS=2 GPUS=8 RUN=/shared/run1 examples/cluster/torchrun.sh examples/train.py --ep-size 16
#
# HEAD    host where the processes meet, the same for all; PORT (29500) is open there
# HOSTS   number of hosts, GPUS: processes on each
# RUN     run folder of train.py and finetune_transformers.py, on a disk that all hosts share. Started again, the run
#         goes on from its newest checkpoint. Leave it out for other programs
# JOB     any name; two jobs with one HEAD and PORT need two names
#
# The ranks of a host are consecutive, as rows in two hops want them (docs/transports.md).
set -euo pipefail

: "${HEAD:?name the host where the processes meet}" "${HOSTS:?how many hosts}" "${GPUS:?how many processes a host}"
program=("$@")
# No checkpoint is written before the processes of all hosts have started, so all of them decide alike.
if [[ -n ${RUN:-} ]]; then
    if compgen -G "$RUN/checkpoints/step_*[0-9]" >/dev/null; then
        program+=(--resume "$RUN")
    else
        program+=(--run-dir "$RUN")
    fi
fi
exec "${PYTHON:-python3}" -m torch.distributed.run \
    --nnodes "$HOSTS" --nproc-per-node "$GPUS" --max-restarts 0 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "${JOB:-sonic_ep}" \
    "${program[@]}"
