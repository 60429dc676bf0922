"""The default experiment: a toy token stream on which a tied model can be as good as an untied one.

Every field of every config is here, with its unit and its default (a test compares them with those in the code). The
other configs are small edits of this one; a config that lacks a field takes its default.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.seed = 0  # initial values, order of the training batches, dropout

    c.model = ConfigDict()
    # tied | untied | scaled_input | scaled_output | soft_cap | projection | width_scaled | late_untie | path_weights |
    # lookup_only | scoring_only | gated_rare_rows | low_rank | factorised | spd_pair | centred: see
    # tied_lm/model/schemes.py
    c.model.tying = "tied"  # the scheme: which matrix looks up, and which scores
    c.model.features = 32  # D, embedding width
    c.model.body = "none"  # none | mlp | lstm | transformer: what turns the looked-up vectors into hidden vectors
    c.model.compute_dtype = "float32"  # float32 | bfloat16: of the operands of products; all else is float32
    c.model.init_std = 0.02  # standard deviation of the initial entries of the vocabulary matrices
    c.model.scale_input = False  # multiply what is looked up by sqrt(D), at run time
    c.model.matmul_precision = "exact"  # exact | fast: of float32 products on GPUs and TPUs, which can round operands
    c.model.block_tokens = 0  # tokens whose logits a device holds at a time; 0: by V, D and the kind of device

    c.scheme = ConfigDict()  # what the tying schemes take; each reads its own
    c.scheme.same_start = False  # untied: start both matrices from the same values
    c.scheme.soft_cap = 30.0  # soft_cap: c, the bound of the logits
    c.scheme.projection_penalty = 0.15  # projection: nats for each unit of its Frobenius norm
    c.scheme.readout_multiplier = 1.0  # width_scaled: m, in logits (m D_0 / D) h S^T
    c.scheme.base_features = 64  # width_scaled: D_0, the width at which the scale is m
    c.scheme.untie_step = 500  # late_untie: updates before the matrices part
    c.scheme.lookup_weight = 1.0  # path_weights: of the lookup's gradient, before the two are added
    c.scheme.scoring_weight = 1.0  # path_weights: of the scoring's gradient
    c.scheme.rare_band = 4  # gated_rare_rows: the first band whose rows are rare; 5 is that of the unseen
    c.scheme.gate_from_frequent = 0.1  # gated_rare_rows: scale of rare rows' push from tokens with a frequent target
    c.scheme.gate_from_rare = 1.0  # gated_rare_rows: and from tokens with a rare target
    c.scheme.rank = 4  # low_rank: r, of what is added to the matrix that scores
    c.scheme.factor_features = 16  # factorised: d, width of the vocabulary matrix

    c.body = ConfigDict()  # what the bodies take; each reads its own
    c.body.depth = 1  # mlp, transformer: blocks; lstm: layers, at most 3
    c.body.width = 0  # mlp, transformer: units of the hidden layers, 0 means 4 D; lstm: of each layer, 0 means D
    c.body.dropout = 0.0  # lstm, transformer: share of the units that a training step leaves out
    c.body.stateful = False  # lstm: carry the state from batch to batch; needs data.order = "contiguous"
    c.body.heads = 4  # transformer: attention heads, which divide D into even parts
    c.body.remat = False  # transformer: compute the blocks again in the backward pass, to save memory

    c.data = ConfigDict()
    c.data.source = "toy"  # toy | text
    c.data.seed = 0  # the toy law or the split of the text, and the held-out tokens
    c.data.vocab_size = 256  # V, rows; 0: all that a text has
    c.data.batch_size = 32  # B, sequences in a step
    c.data.length = 64  # L, target tokens in a sequence
    c.data.eval_tokens = 65_536  # held-out tokens in one evaluation
    c.data.reversibility = 1.0  # toy: 1 is a reversible chain, 0 a directed one
    c.data.classes = 16  # toy: K, token classes
    c.data.zipf_exponent = 1.0  # toy: the token of rank r has weight 1 / (r + 1) ** exponent in its class
    c.data.tokenizer = "bytes"  # text: bytes | words | bpe | ids (files that hold ids: .bin and .npy)
    c.data.min_count = 1  # words: those that occur less often in the training text are <unk>
    c.data.bin_dtype = "uint16"  # ids: uint16 | uint32 | int64, what .bin files hold
    c.data.paths = ()  # text: files, folders or globs; none means the text that ships with Python
    c.data.heldout_paths = ()  # text: files, folders or globs that are held out; none means a share of data.paths
    c.data.heldout_fraction = 0.1  # text: share of the bytes that is held out, without data.heldout_paths
    c.data.order = "random"  # text: random | contiguous (each sequence goes on where that of the last step ended)

    c.loss = ConfigDict()
    c.loss.z = 0.0  # z-loss: times the squared log-sum-exp of each token's logits, added in training alone

    c.optimizer = ConfigDict()
    c.optimizer.name = "adam"  # adam | adamw | sgd | momentum | muon (adam for all but the body's matrices) |
    # coupled_adam (one second moment for all rows of the matrix that scores)
    c.optimizer.learning_rate = 0.02  # the highest rate of the schedule
    c.optimizer.vocab_learning_rate = 0.0  # the same for the vocabulary matrices; 0 means learning_rate
    c.optimizer.schedule = "cosine"  # constant | cosine | wsd (warm-up, stable, linear decay)
    c.optimizer.warmup_steps = 50  # updates of linear warm-up, fewer than train.steps
    c.optimizer.decay_steps = 0  # wsd: updates of linear decay at the end, at least 1
    c.optimizer.beta1 = 0.9  # decay of the first moment (adam and its kin) or of the velocity (momentum, muon)
    c.optimizer.beta2 = 0.999  # decay of the second moment (adam and its kin)
    c.optimizer.weight_decay = 0.0  # adamw, muon: decoupled decay of everything but the vocabulary matrices
    c.optimizer.vocab_weight_decay = 0.0  # adamw, muon: decoupled decay of the vocabulary matrices, in every arm
    c.optimizer.clip_norm = 0.0  # largest global norm of the gradient; 0 turns clipping off

    c.train = ConfigDict()
    c.train.steps = 1000  # updates
    c.train.eval_every = 100  # updates between evaluations; also at 0 and at the end

    c.log = ConfigDict()
    c.log.scalars_every = 50  # updates between records of the training loss
    c.log.rows_every = 64  # largest gap, in updates, between records of the rows
    c.log.probe_tokens = 32_768  # held-out tokens over which the probe sums the gradient tables
    c.log.tokens = ()  # ids to follow as curves, besides a frequent, a middle and a rare one
    c.log.writers = ("tensorboard",)  # where scalars and histograms go, beside metrics.jsonl: tensorboard, or nothing
    c.log.matrices = False  # keep the vocabulary matrices at the steps of the probe, about 12: 4 V D bytes each

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 500  # updates between checkpoints; also at the end
    c.checkpoint.keep = 2  # newest checkpoints to keep, besides the best one

    c.mesh = ConfigDict()  # the devices of a run: data * vocab of them; 0 in one of the two: all that there are
    c.mesh.data = 1  # devices among which the sequences of a batch are shared out; divides batch_size
    c.mesh.vocab = 1  # devices among which the rows of the vocabulary matrices are shared out
    c.mesh.body = "replicated"  # replicated | sharded: each device has the whole body, or a part of it (over data)
    c.mesh.distributed = False  # several processes do the run together; their devices are one mesh
    c.mesh.coordinator = ""  # distributed: HOST:PORT of the first process; "": as the scheduler says
    c.mesh.processes = 0  # distributed: how many there are; 0: as the scheduler says
    c.mesh.process = -1  # distributed: the number of this one, from 0 on; -1: as the scheduler says

    c.compare = ConfigDict()
    c.compare.arms = ConfigDict()  # name of the arm = its overrides, separated by spaces
    c.compare.arms.tied = "model.tying=tied"
    c.compare.arms.untied = "model.tying=untied"
    c.compare.baseline = "untied"  # the arm that is subtracted from the others
    c.compare.seeds = 5  # runs of each arm, with seeds seed, seed + 1, ...
    c.compare.margin = 0.01  # nats a token: a difference of losses that is smaller does not matter
    c.compare.match = "width"  # width | parameters: the other arms are widened or narrowed to the baseline's number |
    # depth: they get the number of blocks that comes nearest to it, then the width of the body
    return c
