/* Records what processes do to the files below one folder: loaded before libc (LD_PRELOAD), see recording.py.

   FOVEA_RECORD names the record, FOVEA_RECORD_ROOT the folder. A record is appended once the call has succeeded and
   before it returns, so that whatever a program does because of it comes later in the record; of a sync, its begin is
   recorded too, since it covers only what was written before that. Files are known by inode, folders by path. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { LINK = 1, WRITE, TRUNCATE, EXTEND, SYNC_BEGIN, SYNC_END, RENAME, UNLINK, MKDIR, RMDIR };

struct __attribute__((packed)) header {
    uint8_t kind;
    uint64_t inode, number; /* an offset, a size, or which sync it is */
    uint32_t path_size, data_size;
};

#define MOST_INODES 65536
static _Atomic uint64_t inodes[MOST_INODES]; /* of files opened below the folder: an open hash table */
static char root[4096];
static size_t root_size;
static int record = -1;
static _Atomic uint64_t sync_count;

#define REAL(name) \
    static __typeof__(name) *real_##name; \
    if (!real_##name) real_##name = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("FOVEA_RECORD_ROOT"), *path = getenv("FOVEA_RECORD");
    if (!folder || !path) return;
    snprintf(root, sizeof root, "%s", folder);
    root_size = strlen(root);
    int low = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    record = fcntl(low, F_DUPFD_CLOEXEC, 900); /* away from the numbers that programs expect */
    syscall(SYS_close, low);
}

static void note(enum kind kind, uint64_t inode, uint64_t number, const char *path, const void *data, size_t size) {
    int before = errno;
    struct header header = {kind, inode, number, path ? (uint32_t)strlen(path) : 0, (uint32_t)size};
    struct iovec parts[] = {{&header, sizeof header}, {(void *)path, header.path_size}, {(void *)data, size}};
    ssize_t all = (ssize_t)(sizeof header + header.path_size + size);
    if (syscall(SYS_writev, record, parts, 3) != all) abort(); /* a record with a hole would prove nothing */
    errno = before;
}

/* The absolute path, if it is below the folder. */
static int is_below(int folder, const char *path, char *whole) {
    if (record < 0) return 0;
    char base[4096] = "";
    if (path[0] != '/') {
        char link[64];
        snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, base, sizeof base - 2);
        if (size < 0) return 0;
        base[size] = '/';
        base[size + 1] = 0;
    }
    snprintf(whole, 4096, "%s%s", base, path);
    return !strncmp(whole, root, root_size) && (whole[root_size] == '/' || !whole[root_size]);
}

static int is_known(uint64_t inode, int add) {
    for (uint64_t i = inode % MOST_INODES;; i = (i + 1) % MOST_INODES) {
        uint64_t found = atomic_load(&inodes[i]);
        if (found == inode) return 1;
        if (found) continue;
        if (!add) return 0;
        if (atomic_compare_exchange_strong(&inodes[i], &found, inode) || found == inode) return 1;
    }
}

/* The inode of a file that was opened below the folder, else 0. */
static uint64_t inode_of(int file) {
    struct stat found;
    int before = errno;
    if (record < 0 || fstat(file, &found) || !(S_ISREG(found.st_mode) || S_ISDIR(found.st_mode))) {
        errno = before;
        return 0;
    }
    return is_known(found.st_ino, 0) ? found.st_ino : 0;
}

static int opened(int file, int folder, const char *path, int flags) {
    char whole[8192];
    struct stat found;
    if (file < 0 || !is_below(folder, path, whole) || fstat(file, &found)) return file;
    is_known(found.st_ino, 1);
    if (flags & O_CREAT) note(LINK, found.st_ino, 0, whole, 0, 0);
    if (flags & O_TRUNC && (flags & O_ACCMODE) != O_RDONLY) note(TRUNCATE, found.st_ino, 0, 0, 0, 0);
    return file;
}

#define MODE \
    va_list list; \
    va_start(list, flags); \
    mode_t mode = (mode_t)va_arg(list, int); \
    va_end(list)
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        MODE; \
        return opened(real_##name(path, flags, mode), AT_FDCWD, path, flags); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        MODE; \
        return opened(real_##name(folder, path, flags, mode), folder, path, flags); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

static ssize_t written_at(int file, off_t offset, const void *data, ssize_t size) {
    uint64_t inode = size > 0 ? inode_of(file) : 0;
    if (inode) note(WRITE, inode, (uint64_t)offset, 0, data, (size_t)size);
    return size;
}

/* What was written where the file's own position was; also with O_APPEND, the position is now behind it. */
static ssize_t written(int file, const void *data, ssize_t size) {
    uint64_t inode = size > 0 ? inode_of(file) : 0;
    if (inode) note(WRITE, inode, (uint64_t)(lseek(file, 0, SEEK_CUR) - size), 0, data, (size_t)size);
    return size;
}

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    return written(file, data, real_write(file, data, size));
}

#define PWRITE(name, offset_t) \
    ssize_t name(int file, const void *data, size_t size, offset_t offset) { \
        REAL(name); \
        return written_at(file, offset, data, real_##name(file, data, size, offset)); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    ssize_t size = real_writev(file, parts, count), done = 0;
    uint64_t inode = size > 0 ? inode_of(file) : 0;
    if (!inode) return size;
    off_t at = lseek(file, 0, SEEK_CUR) - size;
    for (int i = 0; i < count && done < size; done += (ssize_t)parts[i++].iov_len) {
        size_t left = (size_t)(size - done), one = parts[i].iov_len < left ? parts[i].iov_len : left;
        note(WRITE, inode, (uint64_t)(at + done), 0, parts[i].iov_base, one);
    }
    return size;
}

/* A copy within the kernel: what was copied is read once more from its source, whose position is behind it. */
static ssize_t copied(int to, int from, const off_t *offset, ssize_t size) {
    if (size <= 0 || !inode_of(to)) return size;
    char *data = malloc((size_t)size);
    off_t begin = (offset ? *offset : lseek(from, 0, SEEK_CUR)) - size;
    if (!data || pread(from, data, (size_t)size, begin) != size) abort();
    written(to, data, size);
    free(data);
    return size;
}

#define SENDFILE(name, offset_t) \
    ssize_t name(int to, int from, offset_t *offset, size_t size) { \
        REAL(name); \
        return copied(to, from, (const off_t *)offset, real_##name(to, from, offset, size)); \
    }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size, unsigned flags) {
    if (inode_of(to)) {
        errno = EXDEV; /* every caller has another way */
        return -1;
    }
    REAL(copy_file_range);
    return real_copy_file_range(from, from_at, to, to_at, size, flags);
}

#define SIZED(name, offset_t) \
    int name(int file, offset_t size) { \
        REAL(name); \
        int failed = real_##name(file, size); \
        uint64_t inode = failed ? 0 : inode_of(file); \
        if (inode) note(TRUNCATE, inode, (uint64_t)size, 0, 0, 0); \
        return failed; \
    }
SIZED(ftruncate, off_t)
SIZED(ftruncate64, off64_t)

#define ALLOCATE(name, offset_t) \
    int name(int file, offset_t offset, offset_t size) { \
        REAL(name); \
        int failed = real_##name(file, offset, size); \
        uint64_t inode = failed ? 0 : inode_of(file); \
        if (inode) note(EXTEND, inode, (uint64_t)(offset + size), 0, 0, 0); \
        return failed; \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

#define SYNC(name) \
    int name(int file) { \
        REAL(name); \
        uint64_t inode = inode_of(file), which = ((uint64_t)getpid() << 32) | ++sync_count; \
        if (inode) note(SYNC_BEGIN, inode, which, 0, 0, 0); \
        int failed = real_##name(file); \
        if (inode && !failed) note(SYNC_END, inode, which, 0, 0, 0); \
        return failed; \
    }
SYNC(fsync)
SYNC(fdatasync)

static int renamed(int failed, int from, const char *old, int to, const char *new) {
    char source[8192], target[8192];
    int is_source = is_below(from, old, source), is_target = is_below(to, new, target);
    if (failed || !(is_source || is_target)) return failed;
    if (!is_source || !is_target) abort(); /* across the border of what is recorded */
    note(RENAME, 0, 0, source, target, strlen(target));
    return failed;
}

int rename(const char *old, const char *new) {
    REAL(rename);
    return renamed(real_rename(old, new), AT_FDCWD, old, AT_FDCWD, new);
}

int renameat(int from, const char *old, int to, const char *new) {
    REAL(renameat);
    return renamed(real_renameat(from, old, to, new), from, old, to, new);
}

static int linked(int failed, int folder, const char *path) {
    char whole[8192];
    struct stat found;
    if (failed || !is_below(folder, path, whole) || stat(whole, &found)) return failed;
    note(LINK, found.st_ino, 0, whole, 0, 0);
    return failed;
}

int link(const char *old, const char *new) {
    REAL(link);
    return linked(real_link(old, new), AT_FDCWD, new);
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
    REAL(linkat);
    return linked(real_linkat(from, old, to, new, flags), to, new);
}

static int gone(int failed, enum kind kind, int folder, const char *path) {
    char whole[8192];
    if (!failed && is_below(folder, path, whole)) note(kind, 0, 0, whole, 0, 0);
    return failed;
}

int unlink(const char *path) {
    REAL(unlink);
    return gone(real_unlink(path), UNLINK, AT_FDCWD, path);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    return gone(real_unlinkat(folder, path, flags), flags & AT_REMOVEDIR ? RMDIR : UNLINK, folder, path);
}

int rmdir(const char *path) {
    REAL(rmdir);
    return gone(real_rmdir(path), RMDIR, AT_FDCWD, path);
}

static int made(int failed, int folder, const char *path) {
    char whole[8192];
    struct stat found;
    if (failed || !is_below(folder, path, whole) || stat(whole, &found)) return failed;
    is_known(found.st_ino, 1);
    note(MKDIR, found.st_ino, 0, whole, 0, 0);
    return failed;
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return made(real_mkdir(path, mode), AT_FDCWD, path);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat);
    return made(real_mkdirat(folder, path, mode), folder, path);
}

