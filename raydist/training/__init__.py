"""The optional training framework: data, models, loop, parallelism, sharded states. (rank side)

Takes the rank's context and its backend. Provides `raydist.fit` and its parts. A script needs none
of it.

    blocks.py             The blocks of a model: the modules that are sharded and compiled one by
                          one
    blueprint.py          A model as the job made it, without its values, to divide it once more
    checkpointer.py       How the states of a training are kept, saved and found again, by kind of
                          model
    compiled.py           torch.compile for the loss, and for a whole model by its blocks:
                          train.compile
    data.py               The order of the samples, and each rank's share of every batch
    dcp_state.py          The state of a sharded model in the form of torch's DCP, and how it is
                          filled
    deal.py               Deals the items of a source without an index to a rank, step by step
    evaluation.py         Metrics over the test samples; each sample counts once, whatever the rank
                          count
    export.py             Writes the weights of a model, also of one that is divided, to safetensors
                          files
    fit.py                raydist.fit: prepares data, model, loss and checkpoints of a training, and
                          runs its loop
    flops.py              Model FLOPs utilization: a language model's operations and the peaks of
                          GPUs
    gpt.py                A language model of 1 M to 8 B parameters
    heads.py              The attention heads of a model, which the ranks of a tp group must divide
                          evenly
    held_out.py           The test samples of a rank in batches, of a data set or a stream; each
                          counts once
    hf_stages.py          Cuts a model of transformers into the stages of a pipeline
    hooks.py              The functions of a job that raydist.fit calls by name, and the check that
                          it can
    loop.py               The training loop: epochs, evaluation, checkpoints, resume, reports
    loss_chunks.py        The loss of large vocabularies by chunks of the positions:
                          train.loss_chunks
    memory.py             The most bytes that the training of a model takes on a rank, by their use
    meta.py               Creates the values of a model on meta: the same whole, by blocks, or in a
                          stage
    model_call.py         How a batch becomes the arguments of a model, and the loss that a model
                          computes
    models.py             Small models for the jobs: each trains in seconds on a CPU
    optim.py              The optimizer, its groups, its learning rate for a global batch, its
                          schedule
    outlive.py            Continues a training in this process after another rank was killed, if
                          exact
    parallel.py           Sharded models on a DeviceMesh: fully_shard by blocks, tensor parallelism
                          by plan
    pipeline.py           A model in pipeline stages, over torch.distributed.pipelining
    rank_model.py         A rank's model: on its device, wrapped by the backend, with its optimizer
    ray_data.py           A ray.data.Dataset for raydist.fit: each rank reads its part of
                          streaming_split
    recompute.py          Activations that are computed again in the backward pass: train.recompute
    recoverable.py        raydist.Recoverable: a loop of one's own goes back to its last state after
                          a failure
    reshard.py            Shards or a whole state in ranks' memories, read by any number of ranks
                          with DCP
    sharded.py            Sharded states (FSDP) in memory: each rank's shards, with a copy on the
                          next node
    snapshot_interval.py  How many steps lie between snapshots, from what a snapshot costs
    snapshotter.py        Snapshots: keeping one, which one all ranks restore, writing one to disk
    sources.py            Streams and loaders for raydist.fit: sources without an index, and their
                          states
    stages.py             Cuts a model into the stages of a pipeline, at block boundaries
    step.py               One optimizer step: forward, backward, averaging, clipping, update; and
                          its state
    token_loss.py         The loss per target instead of per batch: train.loss_per=token, for padded
                          samples
    tokenizer.py          Byte-pair encoding: one rank trains the vocabulary, each encodes a part of
                          the text
    tokens.py             Token files on disk as a data set: cut into sequences, read by mmap
    training_state.py     How far a training is, and its whole state: what is kept, saved and
                          continued
    waits.py              How long a rank waits for its data, and what to change if that is long
    weights.py            Weights from safetensors files into a model, a part of it at a time
"""
