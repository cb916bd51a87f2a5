#!/usr/bin/env bash
# One job of a run starts torchrun on every node. The job saves before its end, and requeues itself until the run is
# complete. launch/slurm/submit.py replaces the words between double underscores.
#SBATCH --job-name=__NAME__
#SBATCH --nodes=__NODES__
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=__FOLDER__/job_%j.log
#SBATCH --signal=B:USR1@__MARGIN_SECONDS__
__OPTIONS__

folder=__FOLDER__
run_dir=__RUN_DIR__

# --- on each node: torchrun, one agent -----------------------------------------------------------------------
if [ "${1:-}" = node ]; then
    trap '' USR1  # would end torchrun and ranks that do not handle it yet; the ranks also watch the clock
    is_host=0
    [ "$SLURM_NODEID" -eq 0 ] && is_host=1
    exec __PYTHON__ -m torch.distributed.run --nnodes=__NODES__ --nproc_per_node=__RANKS_PER_NODE__ \
        --max-restarts=__MAX_RESTARTS__ --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
        --rdzv-endpoint="$RENDEZVOUS" --rdzv-conf="is_host=$is_host" \
        --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU \
        "$folder/source/launch/pretrain.py" --config "$folder/config.yaml" __ARGUMENTS__
fi

# --- on the first node: the job --------------------------------------------------------------------------------
say() { echo "$(date +%FT%T) job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: $*"; }

if [ -e "$folder/complete" ]; then
    say "the run is complete"
    exit 0
fi
if [ -e "$folder/stopped_by_monitor" ]; then  # the job before this one in the chain
    say "the monitor stopped the run at a spike ($run_dir/monitor_stop.json); not started"
    exit 13
fi
if [ ! -d "$folder/source" ]; then
    say "$folder is gone, with the source of this job; submit the run again: it goes on from its newest checkpoint"
    exit 2
fi
cd __WORKING_DIR__ || exit 1
# With this variable, each start after the first continues from the run folder, also in later jobs of the chain.
export GSA_SUBMISSION="$folder"
export PYTHONPATH="$folder/source:$folder/source/kernels:$folder/source/data"
# Otherwise, after a restart of several nodes, torchrun's ranks would find the addresses of the previous start.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# By default torchrun kills its ranks 30 s after it forwards a signal, but a save may take longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=__MARGIN_SECONDS__
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
export RENDEZVOUS="$address:$((20000 + SLURM_JOB_ID % 20000))"
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then  # before Slurm 23.02
    SLURM_JOB_START_TIME=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %S)" +%s)
    end=$(squeue -h -j "$SLURM_JOB_ID" -o %e)
    if SLURM_JOB_END_TIME=$(date -d "$end" +%s 2>/dev/null); then
        export SLURM_JOB_START_TIME SLURM_JOB_END_TIME
    else
        unset SLURM_JOB_START_TIME SLURM_JOB_END_TIME  # no time limit
    fi
fi

latest() { tr -cd 'a-z0-9_' < "$run_dir/checkpoints/latest" 2>/dev/null; }
# Inode and time of the file, because a run with --resume-after-stop deletes the old file when it opens its folder.
spike() { stat -c '%i %Y' "$run_dir/monitor_stop.json" 2>/dev/null; }

asked=
# Slurm sends USR1 to this script only. Before a preemption it sends TERM to every process of the job.
# The trap uses `$!`, because a signal may come after the start of srun but before `step=$!`.
trap 'asked=USR1; interrupted=yes; kill -USR1 "$!" 2>/dev/null' USR1
trap 'asked=TERM; interrupted=yes' TERM
before=$(latest)
spike_before=$(spike)
rm -f "$run_dir/stopped.json" "$folder/exit_code"
say "starting on $SLURM_JOB_NODELIST, latest checkpoint: ${before:-none}"
srun --kill-on-bad-exit=1 bash "$folder/job.sh" node &
step=$!
interrupted=yes
while [ -n "$interrupted" ]; do  # a trap interrupts wait, whose code is then not srun's
    interrupted=
    wait "$step"
    code=$?
done

if [ "$code" -eq 0 ]; then
    touch "$folder/complete"
    say "the run is complete"
    exit 0
fi
state=$(squeue -h -j "$SLURM_JOB_ID" -o %T)
after=$(latest)
say "srun ended with code $code; asked to stop: ${asked:-no}; latest checkpoint: ${after:-none}; job state: $state"
if [ "$state" != RUNNING ]; then
    exit "$code"  # cancelled, or Slurm is requeueing it already
fi
# The main rank's exit code (gsa_train/process/exit_codes.py). torchrun itself exits with 1.
end=$(cat "$folder/exit_code" 2>/dev/null)
spike_after=$(spike)
if [ "$end" = 13 ] || { [ -n "$spike_after" ] && [ "$spike_after" != "$spike_before" ]; }; then
    touch "$folder/stopped_by_monitor"
    say "the monitor stopped the run at a spike (monitor_stop.json); not started again"
    exit 13
fi
if [ ! -d "$folder/source" ]; then
    say "$folder is gone, with the source of this job; submit the run again: it goes on from its newest checkpoint"
    exit "$code"
elif [ "$end" = 15 ] && scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -qxFf "$folder/bad_nodes"; then
    # Slurm can change the excluded nodes only of a queued job, and ends this script when it requeues the job. A new job
    # therefore replaces this job, and the waiting jobs of the chain wait for it. The option of sbatch overrides the
    # option in the script, so it must also list the nodes that this job excluded.
    bad=$(sort -u "$folder/bad_nodes" | paste -s -d,)
    excluded=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1/p')
    [ -z "$excluded" ] || [ "$excluded" = "(null)" ] || bad="$excluded,$bad"
    if ! next=$(env -u SLURM_JOB_START_TIME -u SLURM_JOB_END_TIME sbatch --parsable --exclude="$bad" "$folder/job.sh"); then
        say "a device is not healthy, see above; no job without $bad could be submitted"
        exit 15
    fi
    next=${next%%;*}
    for waiting in $(squeue -h -u "$(id -un)" -t PENDING -o '%i %E' | grep "afterany:$SLURM_JOB_ID\b" | cut -d ' ' -f 1); do
        [ "$waiting" = "$next" ] || scontrol update JobId="$waiting" Dependency=afterany:"$next" ExcNodeList="$bad"
    done
    say "a device is not healthy, see above; job $next goes on without $bad"
    exit 15
elif [ "$end" = 15 ]; then
    say "a device is not healthy, see above; which node it is the check does not tell: not started again"
    exit 15
elif [ "$end" = 2 ] || [ "$end" = 3 ]; then
    say "ended with exit code $end, which a new start does not mend (2: refused, 3: checkpoints cannot be written); see" \
        "the line above, and submit it again; not started again"
    exit "$end"
elif [ -n "$asked" ] || [ -e "$run_dir/stopped.json" ]; then
    # One stop without a new checkpoint may be chance (a busy node, a long validation). A preemption does not count.
    if [ "$after" != "$before" ] || [ "$asked" = TERM ]; then
        rm -f "$folder/no_progress"
    elif [ -e "$folder/no_progress" ]; then
        rm -f "$folder/no_progress"
        say "stopped at its time limit without a new checkpoint, like the job before; not started again. Give it more" \
            "time (--time), or less of it to the margin (run.slurm_margin_minutes)"
        exit 1
    else
        touch "$folder/no_progress"
    fi
    say "stopped as asked; back into the queue"
elif [ "$after" != "$before" ]; then
    say "failed after a new checkpoint; back into the queue"
else
    say "failed without a new checkpoint; not started again"
    exit "$code"
fi
scontrol requeue "$SLURM_JOB_ID"
sleep 60  # Slurm ends this script
exit "$code"
