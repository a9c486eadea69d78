/* A driver for libibverbs whose devices exist only in a file that a test writes.

   libibverbs loads it as it loads any driver: by a file in /etc/libibverbs.d. It finds the devices in /sys itself, and
   reads their GIDs there. What a real driver asks the kernel, this one reads in HCAS:

       hca NAME FIRMWARE NODE_GUID IMAGE_GUID PORTS
       port NAME NUMBER STATE PHYS_STATE WIDTH SPEED SM_LID LAYER      (numbers of the InfiniBand specification)

   No header has the calls between libibverbs and its drivers; the declarations below are those of rdma-core 44,
   where their version is 34 (IBVERBS_PRIVATE_34). */

#include <endian.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define HCAS "/run/hcas"
#define CALLS 128 /* more than any version has */

struct match {
    void *data;
    const char *modalias;
    uint16_t vendor, device;
    uint8_t kind; /* 1: by PCI vendor and device, 0: end of the table */
};

struct verbs_device {
    struct ibv_device device;
    const void *ops;
    int references;
    void *list[2];
    void *sysfs;
    uint64_t core_support;
};

struct driver {
    const char *name;
    uint32_t least_abi, greatest_abi;
    const struct match *matches;
    const void *linked;
    bool (*matches_too)(void *);
    struct verbs_context *(*open)(struct ibv_device *, int, void *);
    struct verbs_context *(*import)(struct ibv_device *, int);
    struct verbs_device *(*add)(void *);
    void (*remove)(struct verbs_device *);
};

void verbs_register_driver_34(const struct driver *);
void *_verbs_init_and_alloc_context(struct ibv_device *, int, size_t, struct verbs_context *, uint32_t);
void verbs_uninit_context(struct verbs_context *);
void verbs_set_ops(struct verbs_context *, const void *calls);

/* The next line of HCAS that begins with these words. */
static bool find(const char *words, char *line, int size) {
    FILE *file = fopen(HCAS, "r");
    bool found = false;
    while (file && !found && fgets(line, size, file))
        found = strncmp(line, words, strlen(words)) == 0;
    if (file)
        fclose(file);
    return found;
}

static uint64_t guid(const char *text) {
    unsigned part[4] = {0};
    sscanf(text, "%x:%x:%x:%x", &part[0], &part[1], &part[2], &part[3]);
    return htobe64((uint64_t)part[0] << 48 | (uint64_t)part[1] << 32 | (uint64_t)part[2] << 16 | part[3]);
}

static int query_device(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                        struct ibv_device_attr_ex *attr, size_t size) {
    char words[99], line[256], node[32], image[32];
    snprintf(words, sizeof words, "hca %s ", context->device->name);
    if (!find(words, line, sizeof line))
        return ENODEV;
    memset(attr, 0, size);
    unsigned ports;
    sscanf(line + strlen(words), "%63s %31s %31s %u", attr->orig_attr.fw_ver, node, image, &ports);
    attr->orig_attr.node_guid = guid(node);
    attr->orig_attr.sys_image_guid = guid(image);
    attr->orig_attr.phys_port_cnt = ports;
    attr->orig_attr.vendor_id = 0x02c9;
    return 0;
}

static int query_port(struct ibv_context *context, uint8_t number, struct ibv_port_attr *attr) {
    char words[99], line[256];
    snprintf(words, sizeof words, "port %s %u ", context->device->name, number);
    if (!find(words, line, sizeof line))
        return EINVAL;
    unsigned state, phys, width, speed, sm_lid, layer;
    sscanf(line + strlen(words), "%u %u %u %u %u %u", &state, &phys, &width, &speed, &sm_lid, &layer);
    memset(attr, 0, sizeof *attr);
    attr->state = state;
    attr->phys_state = phys;
    attr->active_width = width;
    attr->active_speed = speed;
    attr->sm_lid = sm_lid;
    attr->link_layer = layer;
    attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
    attr->gid_tbl_len = 32;
    return 0;
}

static void close_context(struct ibv_context *context) {
    struct verbs_context *own = verbs_get_ctx(context);
    verbs_uninit_context(own);
    free(own);
}

/* The table of calls is in alphabetical order and differs between releases. The table's entries for some calls are copied to
   places that verbs.h declares, so numbers instead of functions show which entry is which. */
static void find_calls(struct ibv_device *device, int descriptor, size_t *free_context, size_t *query_port) {
    uintptr_t numbers[CALLS];
    for (size_t i = 0; i < CALLS; i++)
        numbers[i] = i + 1;
    struct verbs_context *trial = _verbs_init_and_alloc_context(device, dup(descriptor), sizeof *trial, NULL, 0);
    verbs_set_ops(trial, numbers);
    *free_context = (uintptr_t)trial->context.ops._compat_detach_mcast; /* the one after it */
    *query_port = (uintptr_t)trial->context.ops._compat_query_qp - 2;   /* the one before it */
    verbs_uninit_context(trial);
    free(trial);
}

static struct verbs_context *open_device(struct ibv_device *device, int descriptor, void *data) {
    void *calls[CALLS] = {0};
    size_t to_free, to_query;
    find_calls(device, descriptor, &to_free, &to_query);
    struct verbs_context *own = _verbs_init_and_alloc_context(device, descriptor, sizeof *own, NULL, 0);
    calls[to_free] = close_context;
    calls[to_query] = query_port;
    verbs_set_ops(own, calls);
    own->query_device_ex = query_device;
    own->context.async_fd = eventfd(0, EFD_CLOEXEC);
    return own;
}

static struct verbs_device *add_device(void *sysfs) { return calloc(1, sizeof(struct verbs_device)); }

static void remove_device(struct verbs_device *device) { free(device); }

static const struct match MATCHES[] = {{.vendor = 0x15b3, .device = 0x1021, .kind = 1}, {.kind = 0}};
static const struct driver DRIVER = {
    .name = "mlx5", .greatest_abi = 1, .matches = MATCHES, .open = open_device, .add = add_device, .remove = remove_device};

static __attribute__((constructor)) void register_driver(void) { verbs_register_driver_34(&DRIVER); }
