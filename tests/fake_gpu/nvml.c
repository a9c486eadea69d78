/* NVML: what torch, Ray and pynvml ask of it, answered from the file of machine.h at each call.
   A handle is the number of the GPU + 1; of a MIG instance (instance + 1) * 100 + that. */
#include "machine.h"

enum { OK, UNINITIALIZED, INVALID, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, TIMEOUT = 10,
       GPU_IS_LOST = 15 };
typedef size_t handle;
struct memory { unsigned long long total, free, used; };
struct event {
    handle device;
    unsigned long long type, data;
    unsigned instance, compute_instance;
};
struct events {
    unsigned gpus; /* a bit for each */
    long at;       /* where the set goes on to read the file "xids" */
};
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

static int at(handle h, struct gpu *into) {
    struct gpu gpus[MOST];
    int number = (int)(h % 100) - 1;
    if (number < 0 || number >= fake_gpus(gpus)) return INVALID;
    *into = gpus[number];
    return strcmp(into->state, "lost") ? OK : GPU_IS_LOST;
}

int nvmlInit(void) { return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case OK: return "Success";
    case INVALID: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *into, unsigned size) {
    return snprintf(into, size, "999.0.fake"), OK;
}
int nvmlSystemGetCudaDriverVersion_v2(int *into) { return *into = 13020, OK; }

int nvmlDeviceGetCount_v2(unsigned *into) {
    struct gpu gpus[MOST];
    return *into = fake_gpus(gpus), OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle *into) {
    struct gpu g;
    return *into = index + 1, at(*into, &g);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, handle *into) {
    struct gpu gpus[MOST];
    int there = fake_gpus(gpus);
    for (int i = 0; i < there; i++) {
        char mig[64];
        if (!strcmp(uuid, gpus[i].uuid)) return nvmlDeviceGetHandleByIndex_v2(i, into);
        for (int k = 0; k < gpus[i].mig; k++) {
            fake_mig_uuid(mig, &gpus[i], k);
            if (!strcmp(uuid, mig)) return *into = (k + 1) * 100 + i + 1, OK;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle h, handle *into) {
    return *into = h % 100, OK;
}

int nvmlDeviceGetName(handle h, char *into, unsigned size) {
    struct gpu g;
    int code = at(h, &g);
    return code ? code : (snprintf(into, size, "Fake GPU"), OK);
}

int nvmlDeviceGetUUID(handle h, char *into, unsigned size) {
    struct gpu g;
    int code = at(h, &g);
    if (code) return code;
    char mig[64] = "";
    if (h >= 100) fake_mig_uuid(mig, &g, h / 100 - 1);
    return snprintf(into, size, "%s", *mig ? mig : g.uuid), OK;
}

int nvmlDeviceGetMemoryInfo(handle h, struct memory *into) {
    struct gpu g;
    int code = at(h, &g);
    if (code) return code;
    into->total = (unsigned long long)g.total_mib << 20;
    into->used = (unsigned long long)g.used_mib << 20;
    into->free = into->total - into->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(handle h, struct memory_v2 *into) {
    struct memory plain;
    int code = nvmlDeviceGetMemoryInfo(h, &plain);
    if (code) return code;
    into->total = plain.total, into->free = plain.free, into->used = plain.used, into->reserved = 0;
    return OK;
}

/* A GPU in MIG mode does not tell how busy it is. */
int nvmlDeviceGetUtilizationRates(handle h, unsigned *into) {
    struct gpu g;
    int code = at(h, &g);
    if (code) return code;
    if (g.mig) return NOT_SUPPORTED;
    return into[0] = g.util, into[1] = g.util / 2, OK;
}

int nvmlDeviceGetPowerUsage(handle h, unsigned *milliwatts) {
    struct gpu g;
    int code = at(h, &g);
    return *milliwatts = code ? 0 : g.watts * 1000, code;
}

int nvmlDeviceGetTemperature(handle h, int sensor, unsigned *into) {
    struct gpu g;
    int code = at(h, &g);
    return *into = code ? 0 : g.celsius, code;
}

int nvmlDeviceGetMigMode(handle h, unsigned *now, unsigned *later) {
    struct gpu g;
    int code = at(h, &g);
    return *now = *later = code ? 0 : g.mig > 0, code;
}

int nvmlDeviceGetMaxMigDeviceCount(handle h, unsigned *into) {
    struct gpu g;
    int code = at(h, &g);
    return *into = code ? 0 : g.mig, code;
}

int nvmlDeviceGetMigDeviceHandleByIndex(handle h, unsigned index, handle *into) {
    struct gpu g;
    int code = at(h, &g);
    if (code) return code;
    return *into = (index + 1) * 100 + h, index < (unsigned)g.mig ? OK : NOT_FOUND;
}

/* Errors since the driver was loaded: one where the state is "ecc". `kind` 1: uncorrectable. */
int nvmlDeviceGetTotalEccErrors(handle h, int kind, int since, unsigned long long *into) {
    struct gpu g;
    int code = at(h, &g);
    return *into = !code && kind == 1 && !strcmp(g.state, "ecc"), code;
}

/* The number of a MIG instance on its GPU is not the one by which NVML lists it. */
int nvmlDeviceGetGpuInstanceId(handle h, unsigned *into) { return *into = h / 100 + 6, OK; }

static FILE *xids(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s/xids", getenv("FAKE_GPU") ?: "/nowhere");
    return fopen(path, "r");
}

int nvmlEventSetCreate(struct events **into) {
    return *into = calloc(1, sizeof **into), OK;
}

int nvmlEventSetFree(struct events *set) { return free(set), OK; }

/* From now on: what came before is not in the set. `types` 8: Xids. */
int nvmlDeviceRegisterEvents(handle h, unsigned long long types, struct events *set) {
    struct gpu g;
    int code = at(h, &g);
    if (code) return code;
    if (fake_asked("no-events")) return NO_PERMISSION;
    if (types != 8 || h >= 100) return INVALID;
    FILE *file = xids();
    if (file) {
        fseek(file, 0, SEEK_END);
        set->at = ftell(file);
        fclose(file);
    }
    return set->gpus |= 1u << (h - 1), OK;
}

/* Each line of "xids": a GPU, the Xid, the number of a MIG instance in NVML's list or -1. */
int nvmlEventSetWait_v2(struct events *set, struct event *into, unsigned ms) {
    for (int left = ms;; left -= 50) {
        FILE *file = xids();
        int number, xid, instance, found = 0;
        if (file) fseek(file, set->at, SEEK_SET);
        while (file && !found && fscanf(file, "%d %d %d;", &number, &xid, &instance) == 3) {
            set->at = ftell(file);
            found = set->gpus >> number & 1;
        }
        if (file) fclose(file);
        if (found) {
            unsigned whose = instance < 0 ? 0xFFFFFFFF : instance + 7;
            *into = (struct event){number + 1, 8, xid, whose, whose};
            return OK;
        }
        if (left <= 0) return TIMEOUT;
        usleep(50000);
    }
}

/* Nobody knows the processes of a GPU here. */
int nvmlDeviceGetComputeRunningProcesses(handle h, unsigned *count, void *into) {
    return *count = 0, OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(handle h, unsigned *count, void *into) {
    return *count = 0, OK;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(handle h, unsigned *count, void *into) {
    return *count = 0, OK;
}

/* torch's allocator asks who else uses a GPU that is full, and for NVLink. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, handle *into) {
    unsigned number = 0;
    sscanf(bus, "%*x:%x", &number);
    return nvmlDeviceGetHandleByIndex_v2(number - 16, into);
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void) { return NOT_SUPPORTED; }
