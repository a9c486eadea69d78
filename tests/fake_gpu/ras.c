/* NCCL's RAS: a thread of each process that answers on a local port what all ranks have launched.

   The words, the names and the order of their JSON are those of NCCL 2.28 to 2.31 (src/ras/
   client_support.cc); so is the text, which versions before 2.28 give, as far as it is needed here:
   with $FAKE_GPU/ras-text the thread is one of these. In place of RAS's own network the processes
   share files in the folder $FAKE_GPU. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdarg.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "machine.h"

#define KINDS 5
#define ENTRIES 512
static const char *KIND[KINDS] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"};

struct fake_ras { /* a rank of a communicator, in a file that its process keeps locked */
    char comm[100];
    int rank, ranks, pid, device;
    unsigned long counts[KINDS];
};

struct seen { struct fake_ras e; int alive; };

static void path_of(char *into, size_t size, const char *comm, int rank) {
    snprintf(into, size, "%s/ras-%s.%d", getenv("FAKE_GPU") ?: "/nowhere", comm, rank);
}

/* --- what is answered -------------------------------------------------------------------------- */

static int by_comm(const void *a, const void *b) {
    const struct seen *one = a, *other = b;
    int order = strcmp(one->e.comm, other->e.comm);
    return order ? order : one->e.rank - other->e.rank;
}

/* Those of communicators of which a rank lives: RAS of others knows nothing of them. */
static int read_all(struct seen *all) {
    DIR *folder = opendir(getenv("FAKE_GPU") ?: "/nowhere");
    int count = 0;
    for (struct dirent *d; folder && count < ENTRIES && (d = readdir(folder));) {
        if (strncmp(d->d_name, "ras-fake", 8)) continue;
        int file = openat(dirfd(folder), d->d_name, O_RDONLY | O_CLOEXEC);
        if (file < 0) continue;
        if (read(file, &all[count].e, sizeof all->e) == sizeof all->e) {
            all[count].alive = flock(file, LOCK_SH | LOCK_NB) != 0; /* its process holds the lock */
            count++;
        }
        close(file);
    }
    if (folder) closedir(folder);
    qsort(all, count, sizeof *all, by_comm);
    int kept = 0;
    for (int from = 0, to; from < count; from = to) {
        int alive = 0;
        for (to = from; to < count && !strcmp(all[from].e.comm, all[to].e.comm); to++) alive |= all[to].alive;
        for (int i = from; alive && i < to; i++) all[kept++] = all[i];
    }
    return kept;
}

static void put_member(FILE *out, const struct seen *s, int *first) {
    fprintf(out, "%s        {\n          \"rank\": %d,\n          \"host\": \"127.0.0.1\",\n", *first ? "" : ",\n",
            s->e.rank);
    fprintf(out, "          \"pid\": %d,\n          \"cuda_dev\": %d,\n          \"nvml_dev\": %d,\n", s->e.pid,
            s->e.device, s->e.device);
    fprintf(out, "          \"status\": {\n");
    *first = 0;
    if (!s->alive) {
        fprintf(out, "            \"unresponsive\": true,\n            \"considered_dead\": false\n          }\n        }");
        return;
    }
    fprintf(out, "            \"init_state\": 0,\n            \"async_error\": 0,\n            \"finalize_called\": false,\n");
    fprintf(out, "            \"destroy_flag\": false,\n            \"abort_flag\": false\n          },\n");
    fprintf(out, "          \"collective_counts\": {\n");
    for (int k = 0; k < KINDS; k++)
        fprintf(out, "            \"%s\": %lu%s\n", KIND[k], s->e.counts[k], k < KINDS - 1 ? "," : "");
    fprintf(out, "          }\n        }");
}

static void put_json(FILE *out, struct seen *all, int count) {
    int comms = 0;
    for (int i = 0; i < count; i++) comms += !i || strcmp(all[i].e.comm, all[i - 1].e.comm);
    fprintf(out, "{\n  \"nccl_version\": \"2.30.7\",\n  \"cuda_runtime_version\": 13020,\n");
    fprintf(out, "  \"cuda_driver_version\": 13020,\n  \"timestamp\": \"2026-01-01 00:00:00\",\n");
    fprintf(out, "  \"communicators_count\": %d,\n  \"communicators\": [\n", comms);
    for (int from = 0, to; from < count; from = to) {
        int missing = 0, first = 1;
        for (to = from; to < count && !strcmp(all[from].e.comm, all[to].e.comm); to++) missing += !all[to].alive;
        fprintf(out, "%s    {\n      \"hash\": \"0x%x\",\n      \"secondary_hash\": \"0x1:0x2\",\n", from ? ",\n" : "", from + 1);
        fprintf(out, "      \"size\": %d,\n      \"ranks_count\": %d,\n", all[from].e.ranks, to - from - missing);
        fprintf(out, "      \"missing_ranks_count\": %d,\n      \"ranks\": [\n", missing);
        for (int i = from; i < to; i++) if (all[i].alive) put_member(out, &all[i], &first);
        fprintf(out, "\n      ],\n      \"missing_ranks\": [\n");
        first = 1;
        for (int i = from; i < to; i++) if (!all[i].alive) put_member(out, &all[i], &first);
        fprintf(out, "\n      ]\n    }");
    }
    fprintf(out, "\n  ],\n  \"ras\": {\n    \"collection_time_sec\": 0.001,\n    \"timeouts_count\": 0\n  }\n}\n");
}

static void put_text(FILE *out, struct seen *all, int count) {
    fprintf(out, "NCCL version 2.26.2 compiled with CUDA 12.6\nCUDA runtime version 12060, driver version 12060\n\n");
    fprintf(out, "Job summary\n===========\n\n");
    fprintf(out, "\nCommunicators... (0.00s)\n=============\n\n");
    fprintf(out, "\nErrors\n======\n\nWarnings\n========\n\n");
    for (int from = 0, to; from < count; from = to) {
        int told = 0;
        for (to = from; to < count && !strcmp(all[from].e.comm, all[to].e.comm);) to++;
        for (int k = 0; k < KINDS; k++) {
            int differ = 0;
            for (int i = from; i < to; i++) differ |= all[i].e.counts[k] != all[from].e.counts[k];
            if (!differ) continue;
            if (!told++) fprintf(out, "#0-0 (%016x) MISMATCH\n", from + 1);
            fprintf(out, "  Communicator ranks have different %s operation counts\n", KIND[k]);
            for (int i = from; i < to; i++)
                fprintf(out, "  Rank %d has launched up to operation %lu -- GPU %d managed by process %d on node 127.0.0.1\n",
                        all[i].e.rank, all[i].e.counts[k], all[i].e.device, all[i].e.pid);
            fprintf(out, "\n");
        }
    }
}

/* --- the thread -------------------------------------------------------------------------------- */

static void converse(FILE *in, FILE *out) {
    char line[256];
    int json = 0, old = fake_asked("ras-text");
    while (fgets(line, sizeof line, in)) {
        line[strcspn(line, "\r\n")] = 0;
        if (!strncasecmp(line, "client protocol ", 16)) fprintf(out, "SERVER PROTOCOL 2\n");
        else if (!strncasecmp(line, "timeout ", 8)) fprintf(out, "OK\n");
        else if (!strcasecmp(line, "set format json") && !old) json = 1, fprintf(out, "OK\n");
        else if (!strcasecmp(line, "verbose status") || !strcasecmp(line, "status")) {
            static struct seen all[ENTRIES];
            (json ? put_json : put_text)(out, all, read_all(all));
            return;
        } else fprintf(out, old ? "ERROR: Unknown command\n" : "ERROR: Unknown command %s\n", line);
        fflush(out);
    }
}

static void *serve(void *arg) {
    int listener = (int)(long)arg;
    for (;;) {
        int s = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (s < 0) continue;
        setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){10, 0}, sizeof(struct timeval));
        FILE *in = fdopen(s, "r"), *out = fdopen(dup(s), "w");
        converse(in, out);
        fclose(out);
        fclose(in);
    }
    return NULL;
}

static void start(void) {
    const char *at = getenv("NCCL_RAS_ADDR") ?: "127.0.0.1:28028", *port = strrchr(at, ':');
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    address.sin_port = htons(port ? atoi(port + 1) : 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    setsockopt(listener, SOL_SOCKET, SO_REUSEPORT, &yes, sizeof yes);
    pthread_t thread;
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 16) ||
        pthread_create(&thread, NULL, serve, (void *)(long)listener))
        close(listener);
    else pthread_detach(thread);
}

/* --- what ranks tell --------------------------------------------------------------------------- */

/* A rank has a new communicator. */
struct fake_ras *fake_ras_join(const char *comm, int rank, int ranks, int device) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!strcmp(getenv("NCCL_RAS_ENABLE") ?: "1", "0")) return NULL;
    pthread_once(&once, start);
    char path[PATH_MAX];
    path_of(path, sizeof path, comm, rank);
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0 || flock(file, LOCK_EX | LOCK_NB) || ftruncate(file, sizeof(struct fake_ras))) return NULL;
    struct fake_ras *e = mmap(NULL, sizeof *e, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (e == MAP_FAILED) return NULL; /* the lock lasts as long as the process: its file stays open */
    *e = (struct fake_ras){.rank = rank, .ranks = ranks, .pid = getpid(), .device = device};
    snprintf(e->comm, sizeof e->comm, "%s", comm);
    return e;
}

/* It launches a collective of one of these kinds, by their place in KIND; other calls do not count. */
void fake_ras_count(struct fake_ras *e, int kind) {
    if (e && kind >= 0) __sync_fetch_and_add(&e->counts[kind], 1);
}

/* Its communicator ends. */
void fake_ras_leave(struct fake_ras *e) {
    char path[PATH_MAX];
    if (!e) return;
    path_of(path, sizeof path, e->comm, e->rank);
    unlink(path);
}
