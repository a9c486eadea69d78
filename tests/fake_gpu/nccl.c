/* NCCL on the memory of the host, between processes of one machine.

   The ranks of a communicator are connected by Unix sockets in the folder $FAKE_GPU, which hosts of
   the rig share, each pair by two: for what runs in a stream, and for splits. A message is a descriptor of a memfd, so a sender never waits. What a rank
   needs of the others it gets from each of them, and computes in the order of the ranks. Work runs in
   the stream's thread (cuda.c) and hangs as NCCL's does: if a rank does not come, if ranks disagree
   about the call, if a peer has died; until the communicator is aborted. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <nccl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include "machine.h"

void fake_enqueue(cudaStream_t stream, int later, void (*run)(void *), void *arg);

enum { STREAM, CONTROL };
#define RANKS 64

struct fake_ras *fake_ras_join(const char *comm, int rank, int ranks, int device);
void fake_ras_count(struct fake_ras *ras, int kind);
void fake_ras_leave(struct fake_ras *ras);

struct ncclComm {
    char id[100];
    int rank, ranks, device, splits;
    int peers[RANKS][2]; /* sockets */
    volatile int aborted, pending;
    volatile long launched, turn; /* calls run in the order of their launch, whatever their stream */
    volatile ncclResult_t state;
    struct ncclComm *parent; /* of a split: until it is ready */
    struct fake_ras *ras;
    int color, key;
};

/* Lines like NCCL's own, where its variables say so. */
static void note(const char *kind, const char *format, ...) {
    const char *level = getenv("NCCL_DEBUG"), *into = getenv("NCCL_DEBUG_FILE");
    if (!level || (strcmp(level, "INFO") && strcmp(kind, "WARN"))) return;
    FILE *file = into ? fopen(into, "a") : stdout;
    if (!file) return;
    fprintf(file, "fake:%d:%d [0] NCCL %s ", getpid(), gettid(), kind);
    va_list values;
    va_start(values, format);
    vfprintf(file, format, values);
    va_end(values);
    fputc('\n', file);
    into ? fclose(file) : fflush(file);
}

/* --- messages ---------------------------------------------------------------------------------- */

struct head { size_t size; int kind, root, type, op; };

static void put(struct ncclComm *c, int peer, int channel, struct head h, const void *data) {
    int memory = memfd_create("fake-nccl", MFD_CLOEXEC);
    for (size_t at = 0; at < h.size;) {
        ssize_t wrote = write(memory, (char *)data + at, h.size - at);
        if (wrote <= 0) break;
        at += wrote;
    }
    union { struct cmsghdr aligned; char bytes[CMSG_SPACE(sizeof(int))]; } rights;
    struct iovec vector = {&h, sizeof h};
    struct msghdr m = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = rights.bytes,
                       .msg_controllen = sizeof rights.bytes};
    *CMSG_FIRSTHDR(&m) = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(CMSG_FIRSTHDR(&m)), &memory, sizeof memory);
    while (sendmsg(c->peers[peer][channel], &m, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && !c->aborted &&
           (errno == EAGAIN || errno == ETOOMANYREFS))
        usleep(1000);
    close(memory);
}

/* Whether it came; not if the communicator was aborted. */
static int get(struct ncclComm *c, int peer, int channel, struct head expected, void *into) {
    struct pollfd ready = {c->peers[peer][channel], POLLIN};
    while (!c->aborted && poll(&ready, 1, 5) < 1) continue;
    union { struct cmsghdr aligned; char bytes[CMSG_SPACE(sizeof(int))]; } rights;
    struct head h = {0};
    struct iovec vector = {&h, sizeof h};
    struct msghdr m = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = rights.bytes,
                       .msg_controllen = sizeof rights.bytes};
    int memory = -1;
    if (!c->aborted && recvmsg(ready.fd, &m, MSG_CMSG_CLOEXEC) == sizeof h)
        memcpy(&memory, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof memory);
    while (!c->aborted && (memory < 0 || memcmp(&h, &expected, sizeof h)))
        usleep(5000); /* it has died, or makes another call: NCCL hangs */
    for (size_t at = 0; !c->aborted && at < h.size;) {
        ssize_t count = pread(memory, (char *)into + at, h.size - at, at);
        if (count <= 0) break;
        at += count;
    }
    if (memory >= 0) close(memory);
    return !c->aborted;
}

/* --- communicators ----------------------------------------------------------------------------- */

/* Below a descriptor of the folder, whose path may be too long for an address. */
static void address(struct sockaddr_un *a, int folder, const char *id, int rank) {
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    snprintf(a->sun_path, sizeof a->sun_path, "/proc/self/fd/%d/%.70s.%d", folder, id, rank);
}

static int endpoint(void) { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0); }

static int connect_all(struct ncclComm *c) {
    struct sockaddr_un own, a;
    int folder = open(getenv("FAKE_GPU") ?: "/nowhere", O_PATH | O_DIRECTORY | O_CLOEXEC);
    int listener = endpoint(), hello[2];
    address(&own, folder, c->id, c->rank);
    if (bind(listener, (void *)&own, sizeof own) || listen(listener, 2 * RANKS)) return 0;
    for (int peer = 0; peer < c->rank; peer++)
        for (int channel = 0; channel < 2; channel++) {
            int s = c->peers[peer][channel] = endpoint();
            address(&a, folder, c->id, peer);
            while (connect(s, (void *)&a, sizeof a) && !c->aborted) usleep(2000);
            send(s, (int[2]){c->rank, channel}, sizeof hello, MSG_NOSIGNAL);
        }
    for (int missing = 2 * (c->ranks - c->rank - 1); missing && !c->aborted;) {
        struct pollfd ready = {listener, POLLIN};
        if (poll(&ready, 1, 5) < 1) continue;
        int s = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (recv(s, hello, sizeof hello, MSG_WAITALL) == sizeof hello)
            c->peers[hello[0]][hello[1]] = s, missing--;
    }
    unlink(own.sun_path);
    close(listener);
    close(folder);
    return !c->aborted;
}

/* Each rank's numbers, on all ranks. */
static int share(struct ncclComm *c, int (*numbers)[2]) {
    struct head h = {.size = sizeof *numbers};
    for (int peer = 0; peer < c->ranks; peer++)
        if (peer != c->rank) put(c, peer, CONTROL, h, numbers[c->rank]);
    for (int peer = 0; peer < c->ranks; peer++)
        if (peer != c->rank && !get(c, peer, CONTROL, h, numbers[peer])) return 0;
    return 1;
}

static void split(struct ncclComm *c) {
    struct ncclComm *p = c->parent;
    int numbers[RANKS][2];
    numbers[p->rank][0] = c->color, numbers[p->rank][1] = c->key;
    if (!share(p, numbers)) c->aborted = 1;
    c->rank = c->ranks = 0;
    for (int peer = 0; peer < p->ranks && !c->aborted; peer++) {
        if (numbers[peer][0] != c->color) continue;
        c->ranks++;
        if (numbers[peer][1] < c->key || (numbers[peer][1] == c->key && peer < p->rank)) c->rank++;
    }
}

static int hash(const char *text) {
    unsigned sum = 5381;
    while (*text) sum = 33 * sum + (unsigned char)*text++;
    return (int)sum;
}

static void *start(void *arg) {
    struct ncclComm *c = arg;
    if (c->parent) split(c);
    if (c->parent && c->color == NCCL_SPLIT_NOCOLOR) return NULL;
    int numbers[RANKS][2];
    char bus[32] = "", host[256] = "";
    cudaDeviceGetPCIBusId(bus, sizeof bus, c->device);
    gethostname(host, sizeof host - 1);
    sscanf(bus, "%*x:%x", &numbers[c->rank][0]);
    numbers[c->rank][1] = hash(getenv("NCCL_HOSTID") ?: host);
    if (!connect_all(c) || !share(c, numbers)) return c->state = ncclSystemError, NULL;
    for (int peer = 0; peer < c->ranks; peer++)
        if (peer != c->rank && !memcmp(numbers[peer], numbers[c->rank], sizeof *numbers) &&
            strcmp(getenv("NCCL_MULTI_RANK_GPU_ENABLE") ?: "", "1")) {
            note("WARN", "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1");
            return c->state = ncclInvalidUsage, NULL;
        }
    note("INFO", "NCCL version %d.%d.%d+cuda-fake", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
    note("INFO", "NET/Socket : Using [0]lo:127.0.0.1<0>");
    note("INFO", "Using network Socket");
    for (int i = 0; c->ranks > 1 && i < 2; i++)
        note("INFO", "Channel %02d/0 : %d[%d] -> %d[%d] via P2P/IPC", i, c->rank, c->rank,
             (c->rank + 1) % c->ranks, (c->rank + 1) % c->ranks);
    c->ras = fake_ras_join(c->id, c->rank, c->ranks, c->device);
    c->state = ncclSuccess;
    return NULL;
}

static ncclResult_t begin(struct ncclComm *c, const ncclConfig_t *config) {
    cudaGetDevice(&c->device);
    c->state = ncclInProgress;
    pthread_t thread;
    if (!config || config->blocking != 0) start(c);
    else if (!pthread_create(&thread, NULL, start, c)) pthread_detach(thread);
    return c->state;
}

ncclResult_t ncclGetVersion(int *into) { return *into = NCCL_VERSION_CODE, ncclSuccess; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, 64, "fake-nccl-%d-%ld%09ld", getpid(), t.tv_sec, t.tv_nsec);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    struct ncclComm *c = *comm = calloc(1, sizeof *c);
    c->rank = rank, c->ranks = ranks;
    snprintf(c->id, sizeof c->id, "%.64s", id.internal);
    return begin(c, config);
}
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, ranks, id, rank, NULL);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int ranks, int rank, int ids,
                                      ncclUniqueId *id, ncclConfig_t *config) {
    return ncclCommInitRankConfig(comm, ranks, *id, rank, config);
}

/* A call of all ranks of the parent, of those with no color too. */
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *comm,
                           ncclConfig_t *config) {
    struct ncclComm *c = *comm = calloc(1, sizeof *c);
    c->parent = parent, c->color = color, c->key = key;
    snprintf(c->id, sizeof c->id, "%.70s.%d.%d", parent->id, parent->splits++, color);
    ncclResult_t result = begin(c, color == NCCL_SPLIT_NOCOLOR ? NULL : config);
    if (color != NCCL_SPLIT_NOCOLOR) return result;
    *comm = NULL; /* and its few bytes stay */
    return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t c, int flags) { return c->aborted = 1, ncclSuccess; }

ncclResult_t ncclCommFinalize(ncclComm_t c) {
    while (c->pending && !c->aborted) usleep(1000);
    return ncclSuccess;
}

/* Its few bytes stay: threads of torch may still ask for its state. */
ncclResult_t ncclCommDestroy(ncclComm_t c) {
    fake_ras_leave(c->ras);
    ncclCommFinalize(c);
    c->aborted = 1;
    while (c->pending) usleep(1000);
    for (int peer = 0; peer < c->ranks; peer++)
        for (int channel = 0; channel < 2; channel++)
            if (c->peers[peer][channel]) close(c->peers[peer][channel]), c->peers[peer][channel] = 0;
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t c) { return c->aborted = 1, ncclCommDestroy(c); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *into) {
    return *into = fake_asked("nccl-error") ? ncclSystemError : c->state, ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t c, int *into) { return *into = c->ranks, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *into) { return *into = c->rank, ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t c, int *into) { return *into = c->device, ncclSuccess; }
const char *ncclGetLastError(ncclComm_t c) { return "fake NCCL"; }
const char *ncclGetErrorString(ncclResult_t code) {
    static const char *texts[] = {
        "no error", "unhandled cuda error", "unhandled system error", "internal error",
        "invalid argument", "invalid usage", "remote process exited or there was a network error",
        "NCCL operation in progress", "timeout"};
    return texts[code];
}
ncclResult_t ncclCommRegister(const ncclComm_t c, void *at, size_t size, void **handle) {
    return *handle = at, ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t c, void *handle) { return ncclSuccess; }
ncclResult_t ncclMemAlloc(void **into, size_t size) {
    return cudaMalloc(into, size) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclMemFree(void *at) { return cudaFree(at) ? ncclUnhandledCudaError : ncclSuccess; }

/* --- reductions -------------------------------------------------------------------------------- */

static const int SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static double factors[64]; /* of the operators that torch makes for averages */
static int made;

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                      ncclScalarResidence_t where, ncclComm_t c) {
    float single = *(float *)scalar;
    factors[made % 64] = type == ncclFloat64 ? *(double *)scalar : single;
    return *op = ncclNumOps + made++ % 64, ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t c) { return ncclSuccess; }

static float from_bf16(unsigned short v) {
    unsigned bits = (unsigned)v << 16;
    float f;
    return memcpy(&f, &bits, 4), f;
}
static unsigned short to_bf16(float f) {
    unsigned bits;
    memcpy(&bits, &f, 4);
    return f != f ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#define COMBINE(T, LOAD, STORE, WIDE)                                                              \
    for (size_t i = 0; i < count; i++) {                                                           \
        WIDE sum = LOAD(((T *)in[0])[from + i]);                                                   \
        if (op >= ncclNumOps) sum *= factors[op - ncclNumOps];                                     \
        for (int r = 1; r < ranks; r++) {                                                          \
            WIDE v = LOAD(((T *)in[r])[from + i]);                                                 \
            if (op == ncclProd) sum *= v;                                                          \
            else if (op == ncclMax) sum = v > sum ? v : sum;                                       \
            else if (op == ncclMin) sum = v < sum ? v : sum;                                       \
            else sum += op >= ncclNumOps ? (WIDE)(v * factors[op - ncclNumOps]) : v;               \
        }                                                                                          \
        ((T *)out)[i] = STORE(op == ncclAvg ? sum / (WIDE)ranks : sum);                            \
    }                                                                                              \
    break

/* Elements from..from+count of all ranks' inputs, combined. */
static void reduce(char **in, int ranks, void *out, size_t from, size_t count, int type, int op) {
    switch (type) {
    case ncclInt8: COMBINE(signed char, , , signed char);
    case ncclUint8: COMBINE(unsigned char, , , unsigned char);
    case ncclInt32: COMBINE(int, , , int);
    case ncclUint32: COMBINE(unsigned, , , unsigned);
    case ncclInt64: COMBINE(long long, , , long long);
    case ncclUint64: COMBINE(unsigned long long, , , unsigned long long);
    case ncclFloat16: COMBINE(_Float16, , , float);
    case ncclFloat32: COMBINE(float, , , float);
    case ncclFloat64: COMBINE(double, , , double);
    case ncclBfloat16: COMBINE(unsigned short, from_bf16, to_bf16, float);
    }
}

/* --- collectives ------------------------------------------------------------------------------- */

enum { ALL_REDUCE = 1, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV };

struct call {
    int kind, root, type, op;
    const char *in;
    char *out;
    size_t count;
    ncclComm_t comm;
    cudaStream_t stream;
    long ticket;
    struct call *next;
};

static __thread struct call *group, **group_end;
static __thread int depth;

/* Whether rank `from` gives something to rank `to`. */
static int gives(const struct call *k, int from, int to) {
    switch (k->kind) {
    case BROADCAST: case SCATTER: return from == k->root;
    case REDUCE: case GATHER: return to == k->root;
    case SEND: return from == k->comm->rank && to == k->root;
    case RECV: return from == k->root && to == k->comm->rank;
    default: return 1;
    }
}

static void run(void *arg) {
    struct call *first = arg;
    const char *to_self = NULL; /* what a group sends to its own rank */
    struct ncclComm *shared = first->comm;
    while (shared->turn != first->ticket && !shared->aborted) usleep(200);
    while (fake_asked("hold-nccl") && !first->comm->aborted) usleep(1000);
    for (int get_now = 0; get_now < 2; get_now++) /* all that the group gives, then what it gets */
        for (struct call *k = first; k; k = k->next) {
            struct ncclComm *c = k->comm;
            int n = c->ranks, me = c->rank, blocks = k->kind == REDUCE_SCATTER ||
                k->kind == ALL_TO_ALL || k->kind == SCATTER ? n : 1;
            size_t part = k->count * SIZES[k->type];
            struct head h = {part * blocks, k->kind == RECV ? SEND : k->kind, k->kind >= SEND ? 0 : k->root,
                             k->type, k->op};
            char *in[RANKS] = {0}, *result = NULL;
            int all = 1;
            for (int peer = 0; peer < n && !get_now; peer++)
                if (peer != me && gives(k, me, peer)) put(c, peer, STREAM, h, k->in);
            if (k->kind == SEND && k->root == me) to_self = k->in;
            if (!get_now || k->kind == SEND || c->aborted) continue;
            if (k->kind == RECV && k->root == me) k->in = to_self;
            for (int r = 0; r < n; r++)
                if (gives(k, r, me)) {
                    in[r] = malloc(h.size ?: 1);
                    if (r == me) memcpy(in[r], k->in, h.size);
                    else all &= get(c, r, STREAM, h, in[r]);
                }
            for (int r = 0; all && r < n; r++) {
                if (!in[r]) continue;
                if (k->kind == ALL_REDUCE || k->kind == REDUCE || k->kind == REDUCE_SCATTER) {
                    reduce(in, n, k->out, k->kind == REDUCE_SCATTER ? me * k->count : 0, k->count, k->type, k->op);
                    break;
                }
                result = in[r] + (k->kind == ALL_TO_ALL || k->kind == SCATTER ? me * part : 0);
                int row = k->kind == ALL_GATHER || k->kind == ALL_TO_ALL || k->kind == GATHER ? r : 0;
                memcpy(k->out + row * part, result, part);
            }
            for (int r = 0; r < n; r++) free(in[r]);
        }
    __sync_fetch_and_add(&shared->turn, 1);
    while (first) {
        struct call *k = first;
        first = k->next;
        __sync_fetch_and_sub(&k->comm->pending, 1);
        free(k);
    }
}

static ncclResult_t launch(struct call *calls) {
    while (calls) { /* those of one stream together */
        cudaStream_t stream = calls->stream;
        struct call *now = NULL, **now_end = &now, *rest = NULL, **rest_end = &rest;
        for (struct call *k = calls; k; k = k->next) {
            struct call ***end = k->stream == stream ? &now_end : &rest_end;
            **end = k;
            *end = &k->next;
        }
        *now_end = *rest_end = NULL;
        now->ticket = __sync_fetch_and_add(&now->comm->launched, 1);
        fake_enqueue(stream, 1, run, now);
        calls = rest;
    }
    return ncclSuccess;
}

static ncclResult_t call(int kind, const void *in, void *out, size_t count, ncclDataType_t type,
                         int op, int root, ncclComm_t comm, cudaStream_t stream) {
    if (comm->aborted || comm->state) return comm->state ?: ncclInvalidUsage;
    static const int counted[] = {-1, 4, 0, 1, 2, 3, -1, -1, -1, -1, -1}; /* the places in RAS's list */
    fake_ras_count(comm->ras, counted[kind]);
    struct call *k = calloc(1, sizeof *k);
    *k = (struct call){kind, root, type, op, in, out, count, comm, stream, 0, NULL};
    __sync_fetch_and_add(&comm->pending, 1);
    if (!depth) return launch(k);
    if (!group) group_end = &group;
    *group_end = k;
    group_end = &k->next;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) { return depth++, ncclSuccess; }
ncclResult_t ncclGroupEnd(void) {
    if (--depth) return ncclSuccess;
    struct call *calls = group;
    group = NULL;
    return launch(calls);
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    return call(ALL_REDUCE, in, out, count, type, op, 0, c, s);
}
ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t s) {
    return call(REDUCE, in, out, count, type, op, root, c, s);
}
ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t c, cudaStream_t s) {
    return call(BROADCAST, in, out, count, type, 0, root, c, s);
}
ncclResult_t ncclBcast(void *at, size_t count, ncclDataType_t type, int root, ncclComm_t c,
                       cudaStream_t s) {
    return call(BROADCAST, at, at, count, type, 0, root, c, s);
}
ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type,
                           ncclComm_t c, cudaStream_t s) {
    return call(ALL_GATHER, in, out, count, type, 0, 0, c, s);
}
ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    return call(REDUCE_SCATTER, in, out, count, type, op, 0, c, s);
}
ncclResult_t ncclAlltoAll(const void *in, void *out, size_t count, ncclDataType_t type,
                          ncclComm_t c, cudaStream_t s) {
    return call(ALL_TO_ALL, in, out, count, type, 0, 0, c, s);
}
ncclResult_t ncclGather(const void *in, void *out, size_t count, ncclDataType_t type, int root,
                        ncclComm_t c, cudaStream_t s) {
    return call(GATHER, in, out, count, type, 0, root, c, s);
}
ncclResult_t ncclScatter(const void *in, void *out, size_t count, ncclDataType_t type, int root,
                         ncclComm_t c, cudaStream_t s) {
    return call(SCATTER, in, out, count, type, 0, root, c, s);
}
ncclResult_t ncclSend(const void *in, size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t s) {
    return call(SEND, in, NULL, count, type, 0, peer, c, s);
}
ncclResult_t ncclRecv(void *out, size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t s) {
    return call(RECV, NULL, out, count, type, 0, peer, c, s);
}
