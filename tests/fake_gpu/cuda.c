/* CUDA's runtime and the part of its driver that torch calls, without a GPU.

   Memory of a device is memory of the host. A stream is a queue. Work runs in the caller's thread if
   the queue is empty and nothing holds it back, else in the thread of the stream. So a copy to
   page-locked memory, an event and a collective may end later, as on a GPU; a test says when by a
   file (machine.h). No kernel runs: a launch is an error, so that no number is silently wrong.
   kernels.py computes on the CPU what torch would have launched. */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

#include "machine.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* any stream, any record */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* --- errors: each thread has its last one ------------------------------------------------------ */

static __thread cudaError_t last;

static cudaError_t fail(cudaError_t code) {
    if (code && code != cudaErrorNotReady) last = code;
    return code;
}

cudaError_t cudaPeekAtLastError(void) { return last; }

cudaError_t cudaGetLastError(void) {
    cudaError_t code = last;
    last = cudaSuccess;
    return code;
}

const char *cudaGetErrorString(cudaError_t code) {
    switch ((int)code) {
    case cudaSuccess: return "no error";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorHostMemoryAlreadyRegistered:
        return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported (the fake GPU has no kernels)";
    default: return "unknown error";
    }
}

const char *cudaGetErrorName(cudaError_t code) { return cudaGetErrorString(code); }

CUresult cuGetErrorString(CUresult code, const char **text) {
    *text = cudaGetErrorString((cudaError_t)code);
    return CUDA_SUCCESS;
}

/* What a call that is not here does: missing.c, made from the symbols that torch wants, calls it. */
int fake_missing(const char *name, int code) {
    if (getenv("FAKE_GPU_VERBOSE")) fprintf(stderr, "fake GPU: %s is not there\n", name);
    if (!strncmp(name, "cuda", 4) || !strncmp(name, "__cuda", 6)) last = code;
    return code;
}

/* --- devices: what CUDA_VISIBLE_DEVICES leaves ------------------------------------------------- */

static struct device { int gpu, mig; char uuid[64]; } devices[MOST];
static int count, owner; /* owner: the process that has used CUDA */
static __thread int current;

static void see(const struct gpu *gpus, int gpu, int mig) {
    struct device *d = &devices[count++];
    d->gpu = gpu, d->mig = mig;
    strcpy(d->uuid, gpus[gpu].uuid);
    if (mig >= 0) fake_mig_uuid(d->uuid, &gpus[gpu], mig);
}

/* As CUDA: the list ends at the first entry that is none. Only one MIG instance is ever seen. */
static void look(void) {
    struct gpu gpus[MOST];
    int there = fake_gpus(gpus);
    char list[4096], *rest = list, *word;
    const char *chosen = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; !chosen && i < there; i++) {
        if (gpus[i].mig) {
            count = 0;
            see(gpus, i, 0);
            return;
        }
        see(gpus, i, -1);
    }
    snprintf(list, sizeof list, "%s", chosen ?: "");
    while (chosen && (word = strsep(&rest, ",")) && count < MOST) {
        int before = count;
        for (int i = 0; i < there; i++) {
            char number[16], mig[64];
            snprintf(number, sizeof number, "%d", i);
            if (!strcmp(word, number) || !strcmp(word, gpus[i].uuid))
                see(gpus, i, gpus[i].mig ? 0 : -1);
            for (int k = 0; k < gpus[i].mig; k++) {
                fake_mig_uuid(mig, &gpus[i], k);
                if (!strcmp(word, mig)) see(gpus, i, k);
            }
        }
        if (count == before) return;
        if (devices[count - 1].mig >= 0) {
            devices[0] = devices[count - 1], count = 1;
            return;
        }
    }
}

/* Fork after the first use of CUDA, and the child has no CUDA. */
static cudaError_t use(void) {
    if (owner && owner != getpid()) return fail(cudaErrorInitializationError);
    pthread_mutex_lock(&lock);
    if (!owner) look(), owner = getpid();
    pthread_mutex_unlock(&lock);
    return count ? cudaSuccess : fail(cudaErrorNoDevice);
}

/* A broken GPU fails where the host waits for it. */
static cudaError_t health(int device) {
    struct gpu gpus[MOST];
    if (devices[device].gpu >= fake_gpus(gpus)) return cudaSuccess;
    const char *state = gpus[devices[device].gpu].state;
    if (!strcmp(state, "ecc")) return fail(cudaErrorECCUncorrectable);
    return fail(strcmp(state, "lost") ? cudaSuccess : cudaErrorUnknown);
}

cudaError_t cudaGetDeviceCount(int *into) {
    *into = 0;
    cudaError_t code = use();
    if (!code) *into = count;
    return code;
}

cudaError_t cudaGetDevice(int *into) {
    *into = current;
    return use();
}

cudaError_t cudaSetDevice(int device) {
    cudaError_t code = use();
    if (code) return code;
    if (device < 0 || device >= count) return fail(cudaErrorInvalidDevice);
    current = device;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *into) { return *into = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *into) { return *into = CUDART_VERSION, cudaSuccess; }
CUresult cuDriverGetVersion(int *into) { return *into = CUDART_VERSION, CUDA_SUCCESS; }
CUresult cuInit(unsigned flags) { return (CUresult)use(); }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    struct gpu gpus[MOST];
    cudaError_t code = use();
    if (code) return code;
    if (device < 0 || device >= count) return fail(cudaErrorInvalidDevice);
    const struct device *d = &devices[device];
    if (d->gpu >= fake_gpus(gpus)) return fail(cudaErrorUnknown);
    memset(p, 0, sizeof *p);
    strcpy(p->name, d->mig < 0 ? "Fake GPU" : "Fake GPU MIG");
    int at = 0;
    for (const char *c = d->uuid + 4; *c && at < 16; c++)
        if (*c != '-') {
            unsigned byte;
            sscanf(c++, "%2x", &byte);
            p->uuid.bytes[at++] = byte;
        }
    p->totalGlobalMem = (size_t)gpus[d->gpu].total_mib << 20;
    p->major = 8, p->minor = 0, p->multiProcessorCount = 108, p->warpSize = 32;
    p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerBlock = 49152, p->regsPerMultiprocessor = 65536, p->l2CacheSize = 50 << 20;
    p->pciBusID = 16 + d->gpu, p->unifiedAddressing = 1;
    for (int i = 0; i < 3; i++) p->maxThreadsDim[i] = 1024, p->maxGridSize[i] = 65535;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *into, enum cudaDeviceAttr what, int device) {
    *into = what == cudaDevAttrComputeCapabilityMajor ? 8 : 0;
    return use();
}

CUresult cuDeviceGet(CUdevice *into, int device) { return *into = device, (CUresult)use(); }
CUresult cuDeviceGetAttribute(int *into, CUdevice_attribute what, CUdevice device) {
    return *into = 0, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    return *flags = 0, *active = owner == getpid(), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *into) {
    return *into = owner == getpid() ? (CUcontext)1 : NULL, CUDA_SUCCESS;
}

cudaError_t cudaDeviceGetPCIBusId(char *into, int size, int device) {
    snprintf(into, size, "00000000:%02X:00.0", 16 + devices[device].gpu);
    return use();
}

cudaError_t cudaDeviceCanAccessPeer(int *into, int a, int b) { return *into = a != b, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }

/* Torch asks for driver calls by name; what is not here refuses to work when it is called. */
static CUresult not_here(void) { return fake_missing("a driver call", CUDA_ERROR_NOT_SUPPORTED); }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **into, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    *into = dlsym(RTLD_DEFAULT, name);
    if (!*into) *into = not_here;
    if (found) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* --- streams and events ------------------------------------------------------------------------ */

struct op { struct op *next; void (*run)(void *); void *arg; };

struct CUstream_st {
    int device, threaded, priority;
    struct op *head, **tail; /* the head stays in the queue while it runs */
    struct CUstream_st *next;
};

struct record { int done, users; double at; };           /* one recording of an event */
struct CUevent_st { struct record *record; };

static struct CUstream_st defaults[MOST], *streams;

static struct CUstream_st *stream_of(cudaStream_t s) {
    return (size_t)s > 2 ? s : &defaults[current]; /* 1 and 2: the legacy and the thread's own */
}

static void *work(void *arg) {
    struct CUstream_st *s = arg;
    pthread_mutex_lock(&lock);
    while (s->threaded) {
        struct op *op = s->head;
        if (!op) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        pthread_mutex_unlock(&lock);
        op->run(op->arg);
        pthread_mutex_lock(&lock);
        if (!(s->head = op->next)) s->tail = &s->head;
        free(op);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    free(s);
    return NULL;
}

/* Queue work; nccl.c too. `later`: it may have to wait, so it is not for the caller's thread. */
void fake_enqueue(cudaStream_t stream, int later, void (*run)(void *), void *arg) {
    struct CUstream_st *s = stream_of(stream);
    pthread_mutex_lock(&lock);
    if (!s->head && !later) {
        pthread_mutex_unlock(&lock);
        run(arg);
        return;
    }
    struct op *op = malloc(sizeof *op);
    *op = (struct op){.run = run, .arg = arg};
    if (!s->head) s->tail = &s->head;
    *s->tail = op;
    s->tail = &op->next;
    if (!s->threaded) {
        pthread_t thread;
        s->threaded = 1;
        pthread_create(&thread, NULL, work, s);
        pthread_detach(thread);
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static cudaError_t drain(struct CUstream_st *s) {
    pthread_mutex_lock(&lock);
    while (s->head) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return health(s->device);
}

/* Device of a stream that is no default one; for kernels.py: wait until the device's work is done. */
cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t code = use();
    if (code) return code;
    pthread_mutex_lock(&lock);
    for (struct CUstream_st *s = streams; s; s = s->next)
        while (s->device == current && s->head) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return drain(&defaults[current]);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *into, unsigned flags, int priority) {
    cudaError_t code = use();
    if (code) return code;
    struct CUstream_st *s = *into = calloc(1, sizeof *s);
    s->device = current, s->priority = priority;
    pthread_mutex_lock(&lock);
    s->next = streams, streams = s;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *into) { return cudaStreamCreateWithPriority(into, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *into, unsigned flags) {
    return cudaStreamCreateWithPriority(into, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t s) {
    cudaError_t code = drain(s);
    pthread_mutex_lock(&lock);
    for (struct CUstream_st **at = &streams; *at; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            break;
        }
    int threaded = s->threaded;
    s->threaded = 0; /* its thread frees it */
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    if (!threaded) free(s);
    return code;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    cudaError_t code = use();
    return code ? code : drain(stream_of(s));
}

cudaError_t cudaStreamQuery(cudaStream_t s) {
    pthread_mutex_lock(&lock);
    int busy = stream_of(s)->head != NULL;
    pthread_mutex_unlock(&lock);
    return busy ? cudaErrorNotReady : health(stream_of(s)->device);
}

cudaError_t cudaStreamGetPriority(cudaStream_t s, int *into) {
    return *into = stream_of(s)->priority, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, use();
}

static void release(struct record *r) { /* with the lock */
    if (r && --r->users == 0) free(r);
}

static void finish(void *arg) {
    struct record *r = arg;
    pthread_mutex_lock(&lock);
    r->done = 1, r->at = now();
    pthread_cond_broadcast(&changed);
    release(r);
    pthread_mutex_unlock(&lock);
}

static void await(void *arg) {
    struct record *r = arg;
    pthread_mutex_lock(&lock);
    while (!r->done) pthread_cond_wait(&changed, &lock);
    release(r);
    pthread_mutex_unlock(&lock);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *into, unsigned flags) {
    cudaError_t code = use();
    if (!code) *into = calloc(1, sizeof **into);
    return code;
}
cudaError_t cudaEventCreate(cudaEvent_t *into) { return cudaEventCreateWithFlags(into, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t e) {
    pthread_mutex_lock(&lock);
    release(e->record);
    pthread_mutex_unlock(&lock);
    free(e);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
    cudaError_t code = use();
    if (code) return code;
    struct record *r = calloc(1, sizeof *r);
    r->users = 2; /* the event and the queue */
    pthread_mutex_lock(&lock);
    release(e->record);
    e->record = r;
    pthread_mutex_unlock(&lock);
    fake_enqueue(s, 0, finish, r);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }

cudaError_t cudaEventQuery(cudaEvent_t e) {
    pthread_mutex_lock(&lock);
    int done = !e->record || e->record->done;
    pthread_mutex_unlock(&lock);
    return done ? health(current) : cudaErrorNotReady;
}

static struct record *hold(cudaEvent_t e) {
    pthread_mutex_lock(&lock);
    struct record *r = e->record;
    if (r) r->users++;
    pthread_mutex_unlock(&lock);
    return r;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    struct record *r = hold(e);
    if (r) await(r);
    return health(current);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    struct record *r = hold(e);
    if (r) fake_enqueue(s, !r->done, await, r);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    if (!from->record || !to->record) return fail(cudaErrorInvalidResourceHandle);
    if (!from->record->done || !to->record->done) return cudaErrorNotReady;
    *ms = (to->record->at - from->record->at) * 1000;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t run, void *arg) {
    fake_enqueue(s, 1, run, arg);
    return cudaSuccess;
}

/* No graphs: torch only asks whether it is capturing one. */
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *into) {
    return *into = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *into,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *size) {
    return cudaStreamIsCapturing(s, into);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

/* --- memory ------------------------------------------------------------------------------------ */

static struct range {
    char *at;
    size_t size;
    int device; /* -1: page-locked memory of the host */
    struct range *next;
} *ranges;

static void add(void *at, size_t size, int device) {
    struct range *r = malloc(sizeof *r);
    pthread_mutex_lock(&lock);
    *r = (struct range){at, size, device, ranges};
    ranges = r;
    pthread_mutex_unlock(&lock);
}

static int take(void *at, struct range *into) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (struct range **p = &ranges; *p && !found; p = &(*p)->next)
        if ((*p)->at == at) {
            struct range *gone = *p;
            *into = *gone, *p = gone->next, found = 1;
            free(gone);
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

static int find(const void *at, struct range *into) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (struct range *r = ranges; r && !found; r = r->next)
        if ((char *)at >= r->at && (char *)at < r->at + r->size) *into = *r, found = 1;
    pthread_mutex_unlock(&lock);
    return found;
}

static size_t total(int device) {
    struct gpu gpus[MOST];
    int there = fake_gpus(gpus);
    return devices[device].gpu < there ? (size_t)gpus[devices[device].gpu].total_mib << 20 : 0;
}

static size_t in_use(int device) { /* by this process: other processes are not seen */
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (struct range *r = ranges; r; r = r->next)
        if (r->device == device) bytes += r->size;
    pthread_mutex_unlock(&lock);
    return bytes;
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *all) {
    cudaError_t code = use();
    if (code) return code;
    *all = total(current), *unused = *all - in_use(current);
    return health(current);
}

static cudaError_t allocate(void **into, size_t size, int device) {
    cudaError_t code = use();
    if (code) return code;
    if (device >= 0 && in_use(device) + size > total(device)) return fail(cudaErrorMemoryAllocation);
    *into = mmap(NULL, size ?: 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*into == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
    add(*into, size, device);
    return cudaSuccess;
}

static cudaError_t give_back(void *at) {
    struct range r;
    if (!at) return cudaSuccess;
    cudaDeviceSynchronize();
    if (!take(at, &r)) return fail(cudaErrorInvalidValue);
    munmap(r.at, r.size ?: 1);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **into, size_t size) { return allocate(into, size, current); }
cudaError_t cudaFree(void *at) { return give_back(at); }
cudaError_t cudaHostAlloc(void **into, size_t size, unsigned flags) { return allocate(into, size, -1); }
cudaError_t cudaMallocHost(void **into, size_t size) { return allocate(into, size, -1); }
cudaError_t cudaFreeHost(void *at) { return give_back(at); }

cudaError_t cudaHostRegister(void *at, size_t size, unsigned flags) {
    struct range r;
    cudaError_t code = use();
    if (code) return code;
    if (find(at, &r)) return fail(cudaErrorHostMemoryAlreadyRegistered);
    add(at, size, -1);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *at) {
    struct range r;
    cudaError_t code = use();
    if (code) return code;
    return take(at, &r) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *at) {
    struct range r;
    memset(a, 0, sizeof *a);
    cudaError_t code = use();
    if (code) return code;
    if (!find(at, &r)) return a->type = cudaMemoryTypeUnregistered, cudaSuccess;
    a->type = r.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->device = r.device < 0 ? 0 : r.device;
    a->devicePointer = a->hostPointer = (void *)at;
    return cudaSuccess;
}

struct copy { void *into; const void *from; size_t size; void *staged; int value, slow; };

static void run_copy(void *arg) {
    struct copy *c = arg;
    if (c->slow) usleep(50000);
    while (fake_asked("hold-copies")) usleep(1000);
    if (c->from) memmove(c->into, c->from, c->size);
    else memset(c->into, c->value, c->size);
    free(c->staged);
    free(c);
}

cudaError_t cudaMemcpyAsync(void *into, const void *from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t s) {
    struct range r;
    cudaError_t code = use();
    if (code) return code;
    struct copy *c = calloc(1, sizeof *c);
    *c = (struct copy){.into = into, .from = from, .size = size};
    int busy = cudaStreamQuery(s) == cudaErrorNotReady, held = fake_asked("hold-copies");
    /* Pageable memory: it is read before the call returns, and written before it returns. */
    if (!find(from, &r) && (busy || held))
        c->from = c->staged = memcpy(malloc(size ?: 1), from, size);
    int locked = find(into, &r);
    c->slow = locked && r.device < 0 && size > 8 && fake_asked("slow-copies");
    fake_enqueue(s, held || c->slow, run_copy, c);
    return locked ? cudaSuccess : drain(stream_of(s));
}

cudaError_t cudaMemcpy(void *into, const void *from, size_t size, enum cudaMemcpyKind kind) {
    cudaError_t code = cudaMemcpyAsync(into, from, size, kind, NULL);
    return code ? code : drain(stream_of(NULL));
}

cudaError_t cudaMemcpyPeerAsync(void *into, int a, const void *from, int b, size_t size, cudaStream_t s) {
    return cudaMemcpyAsync(into, from, size, cudaMemcpyDefault, s);
}

cudaError_t cudaMemsetAsync(void *into, int value, size_t size, cudaStream_t s) {
    cudaError_t code = use();
    if (code) return code;
    struct copy *c = calloc(1, sizeof *c);
    *c = (struct copy){.into = into, .size = size, .value = value};
    fake_enqueue(s, fake_asked("hold-copies"), run_copy, c);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *into, int value, size_t size) {
    cudaError_t code = cudaMemsetAsync(into, value, size, NULL);
    return code ? code : drain(stream_of(NULL));
}

/* Segments that grow: addresses first, memory later (PYTORCH_ALLOC_CONF=expandable_segments). */
CUresult cuMemGetAllocationGranularity(size_t *into, const CUmemAllocationProp *what,
                                       CUmemAllocationGranularity_flags flags) {
    return *into = 2 << 20, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *into, size_t size, size_t align, CUdeviceptr hint,
                             unsigned long long flags) {
    void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *into = (CUdeviceptr)at;
    return at == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t size) { return munmap((void *)at, size), CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *into, size_t size, const CUmemAllocationProp *what,
                     unsigned long long flags) {
    int device = what->location.id;
    if (in_use(device) + size > total(device)) return CUDA_ERROR_OUT_OF_MEMORY;
    return *into = device + 1, CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return CUDA_SUCCESS; }
CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    add((void *)at, size, handle - 1);
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *who, size_t count) {
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    struct range r;
    if (!take((void *)at, &r)) return CUDA_ERROR_INVALID_VALUE;
    mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr at) {
    struct range r;
    if (!find((void *)at, &r)) return CUDA_ERROR_INVALID_VALUE;
    return *base = (CUdeviceptr)r.at, *size = r.size, CUDA_SUCCESS;
}

/* --- kernels: none. nvcc's code registers them when it is loaded ------------------------------- */

void **__cudaRegisterFatBinary(void *binary) { return (void **)&lock; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
int __cudaPushCallConfiguration(void) { return 0; }
int __cudaPopCallConfiguration(void) { return 0; }
