/* What the fake machine has: the file "gpus" in the folder $FAKE_GPU, one line for each GPU. A test
   rewrites it to make a GPU busy, hot or broken while programs run. An empty file "hold-NAME" in
   the folder stops work of that name: see fake_asked(). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 16

struct gpu {
    char uuid[64];  /* GPU-00000000-0000-0000-0000-000000000007 is number 7 */
    char state[16]; /* ok; ecc: an uncorrectable memory error; lost: it fell off the bus */
    int mig;        /* its number of MIG instances; 0: MIG is off */
    int util, used_mib, total_mib, watts, celsius;
};

static int fake_gpus(struct gpu *gpus) {
    char path[4096];
    snprintf(path, sizeof path, "%s/gpus", getenv("FAKE_GPU") ?: "/nowhere");
    FILE *file = fopen(path, "r");
    int count = 0;
    while (file && count < MOST) {
        struct gpu *g = &gpus[count];
        if (fscanf(file, "%63s %15s %d %d %d %d %d %d", g->uuid, g->state, &g->mig, &g->util,
                   &g->used_mib, &g->total_mib, &g->watts, &g->celsius) != 8)
            break;
        count++;
    }
    if (file) fclose(file);
    return count;
}

/* MIG-00000000-0000-0000-0002-000000000007: instance 2 of GPU 7. */
static void fake_mig_uuid(char *into, const struct gpu *g, int instance) {
    snprintf(into, 64, "MIG%.20s%04d%s", g->uuid + 3, instance, g->uuid + 27);
}

/* Whether a test asks for this: by the file $FAKE_GPU/NAME, or, of one rank, $FAKE_GPU/NAME.RANK. */
__attribute__((unused)) static int fake_asked(const char *name) {
    char path[4096];
    int size = snprintf(path, sizeof path, "%s/%s", getenv("FAKE_GPU") ?: "/nowhere", name);
    if (access(path, F_OK) == 0) return 1;
    snprintf(path + size, sizeof path - size, ".%s", getenv("RANK") ?: "");
    return access(path, F_OK) == 0;
}
