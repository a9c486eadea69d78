"""The training framework, which a job may use or leave: data, models, loop, parallelism, sharded
states. (rank side)

Gets the rank's context and its backend. Gives `raydist.fit` and what belongs to it. A script needs
none of it.

    blocks.py             The blocks of a model: the modules that are sharded and compiled one by
                          one
    data.py               The order of the samples, and each rank's share of every batch
    evaluation.py         Metrics over the test samples; each sample counts once, whatever the
                          number of ranks
    flops.py              Floating-point operations of a language model, and the most that a chip
                          can do: model FLOPs utilization
    gpt.py                A language model: RMSNorm, rotary positions, grouped queries, SwiGLU; 1 M
                          to 8 B parameters
    heads.py              The attention heads of a model, which the ranks of a tp group must be able
                          to share
    loop.py               The training loop: epochs, evaluation, checkpoints, resume, reports
    memory.py             Bytes of a rank for a model, without a batch: parameters, gradients, the
                          optimizer's state, a block
    meta.py               A model on meta gets its values here, the same wherever they are made:
                          whole, by blocks, in a stage
    models.py             Small models for the jobs: each trains in seconds on a CPU
    optim.py              The optimizer of a name, its learning rate for a global batch, and the
                          schedule of the rate
    parallel.py           A model in shards over torch's DeviceMesh: fully_shard by blocks, tensor
                          parallel by a plan
    pipeline.py           A model in stages over torch.distributed.pipelining; the ranks of a stage
                          share it as in sharded.py
    ray_data.py           A ray.data.Dataset for raydist.fit: each rank reads its part of
                          streaming_split
    reshard.py            Shards, or a whole state, in the memories of ranks, read by any number of
                          ranks: torch divides them
    sharded.py            Sharded states (FSDP) in memory: each rank keeps its own shards, the next
                          node a copy of them
    sharded_state.py      The state of a model in shards: what of it is kept in memory and saved,
                          and how a training finds it
    snapshotter.py        When a state is kept in memory, which one all ranks return to, and how one
                          is written to the disk
    sources.py            Streams and loaders for raydist.fit: the order of a source without an
                          index, and its state
    stages.py             A model cut into the stages of a pipeline, before blocks of it
    step.py               One optimizer step: forward, backward, gradient averaging, clipping,
                          update; and its state
    tokenizer.py          Byte pairs of any bytes: one rank trains the vocabulary, all encode a part
                          of the text
    tokens.py             Token files on disk as a data set: cut into sequences, read by mmap
    waits.py              How long a rank waits for its data, and what to change if that is long
"""
