// Receive memory that is used again: a loop of 16 MiB receives touches no new pages.
//
// A fresh page costs a fault and 4 KiB of zeros; for large messages that is more
// than the copy itself. Blocks go back to a free list for their size when Python
// collects them. The list is bounded; the block unused for longest goes first, so
// sizes that a program no longer uses do not hold the room for ever.
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include <sys/mman.h>

#include <nanobind/nanobind.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kDefaultLimit = std::size_t{128} << 20;

class NoMemory : public std::bad_alloc {  // nanobind raises it as MemoryError
public:
    explicit NoMemory(std::int64_t nbytes)
        : text_("take: the system has no " + std::to_string(nbytes) + " bytes to map") {}
    const char *what() const noexcept override { return text_.c_str(); }

private:
    std::string text_;
};

std::size_t rounded(std::size_t nbytes) {
    const std::size_t unit = nbytes >= kHugePage ? kHugePage : kPage;
    return (nbytes + unit - 1) / unit * unit;
}

// nullptr if the system refuses. Large memory is aligned for huge pages.
void *map_pages(std::size_t bytes) {
    const bool huge = bytes >= kHugePage;
    const std::size_t extra = huge ? kHugePage : 0;
    void *got = mmap(nullptr, bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                     -1, 0);
    if (got == MAP_FAILED)
        return nullptr;
    if (!huge)
        return got;
    char *const begin = static_cast<char *>(got);
    const std::size_t over = reinterpret_cast<std::uintptr_t>(begin) % kHugePage;
    const std::size_t head = over == 0 ? 0 : kHugePage - over;
    if (head > 0)
        munmap(begin, head);
    if (extra - head > 0)
        munmap(begin + head + bytes, extra - head);
    madvise(begin + head, bytes, MADV_HUGEPAGE);  // a hint: without it only slower
    return begin + head;
}

class Pool {
public:
    void *take(std::size_t bytes) {
        std::lock_guard lock(mutex_);
        std::deque<Free> &same = free_[bytes];
        void *at = nullptr;
        if (!same.empty()) {
            at = same.back().at;  // the newest: most likely still in the cache
            same.pop_back();
            cached_ -= bytes;
            ++hits_;
        } else {
            at = map_pages(bytes);
            if (at == nullptr && cached_ > 0) {  // ours may be what is missing
                shrink_to(0);
                at = map_pages(bytes);
            }
            if (at == nullptr)
                return nullptr;
            ++misses_;
        }
        in_use_ += bytes;
        return at;
    }

    void give_back(void *at, std::size_t bytes) noexcept {
        std::lock_guard lock(mutex_);
        in_use_ -= bytes;
        if (bytes <= limit_) {
            shrink_to(limit_ - bytes);
            try {
                free_[bytes].push_back({at, clock_++});
                cached_ += bytes;
                return;
            } catch (const std::bad_alloc &) {  // not cached, then
            }
        }
        munmap(at, bytes);
    }

    void set_limit(std::size_t bytes) {
        std::lock_guard lock(mutex_);
        limit_ = bytes;
        shrink_to(limit_);
    }

    nb::dict statistics() {
        std::lock_guard lock(mutex_);
        nb::dict d;
        d["cached_bytes"] = cached_;
        d["in_use_bytes"] = in_use_;
        d["limit_bytes"] = limit_;
        d["hits"] = hits_;
        d["misses"] = misses_;
        return d;
    }

private:
    struct Free {
        void *at;
        std::uint64_t since;
    };

    // Each list is ordered by `since`, so the oldest of all is the front of one.
    void shrink_to(std::size_t bytes) noexcept {
        while (cached_ > bytes) {
            auto oldest = free_.end();
            for (auto it = free_.begin(); it != free_.end(); ++it)
                if (!it->second.empty() &&
                    (oldest == free_.end() ||
                     it->second.front().since < oldest->second.front().since))
                    oldest = it;
            munmap(oldest->second.front().at, oldest->first);
            cached_ -= oldest->first;
            oldest->second.pop_front();
        }
    }

    std::mutex mutex_;
    std::map<std::size_t, std::deque<Free>> free_;  // by rounded size
    std::size_t cached_ = 0, in_use_ = 0, limit_ = kDefaultLimit;
    std::uint64_t clock_ = 0, hits_ = 0, misses_ = 0;
};

// Never destroyed: blocks of daemon threads may come back while the process exits.
Pool &pool() {
    static Pool &only = *new Pool;
    return only;
}

class Block {
public:
    explicit Block(std::int64_t nbytes) : nbytes_(static_cast<std::size_t>(nbytes)) {
        if (nbytes == 0)
            return;
        if (nbytes > PTRDIFF_MAX - 2 * static_cast<std::int64_t>(kHugePage))
            throw NoMemory(nbytes);  // rounding would overflow
        at_ = pool().take(rounded(nbytes_));
        if (at_ == nullptr)
            throw NoMemory(nbytes);
    }
    ~Block() {
        if (nbytes_ != 0)
            pool().give_back(at_, rounded(nbytes_));
    }
    Block(const Block &) = delete;
    Block &operator=(const Block &) = delete;

    void *data() { return at_; }
    Py_ssize_t size() const { return static_cast<Py_ssize_t>(nbytes_); }

private:
    std::size_t nbytes_;
    void *at_ = this;  // never null: some consumers refuse a null pointer even of 0 bytes
};

int block_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    Block *b = nb::inst_ptr<Block>(self);
    return PyBuffer_FillInfo(view, self, b->data(), b->size(), /*readonly=*/0, flags);
}

Py_ssize_t block_length(PyObject *self) { return nb::inst_ptr<Block>(self)->size(); }

PyType_Slot block_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void *>(block_getbuffer)},
    {Py_sq_length, reinterpret_cast<void *>(block_length)},
    {0, nullptr},
};

nb::object take(std::int64_t nbytes) {
    if (nbytes < 0)
        throw nb::value_error(("take: expected nbytes >= 0, got " +
                               std::to_string(nbytes)).c_str());
    nb::object self = nb::inst_alloc(nb::type<Block>());
    new (nb::inst_ptr<Block>(self)) Block(nbytes);
    nb::inst_mark_ready(self);
    return self;
}

void set_pool_limit(std::int64_t nbytes) {
    if (nbytes < 0)
        throw nb::value_error(("set_pool_limit: expected nbytes >= 0, got " +
                               std::to_string(nbytes)).c_str());
    pool().set_limit(static_cast<std::size_t>(nbytes));
}

}  // namespace

void bind_pool(nb::module_ &m) {
    nb::class_<Block>(m, "Block", nb::is_final(), nb::type_slots(block_slots),
                      "Writable bytes from take(); their memory is used again after collection.");
    m.def("take", &take, "nbytes"_a, "Writable memory, not zeroed, from a free list if it can.");
    m.def("set_pool_limit", &set_pool_limit, "nbytes"_a,
          "Bytes that the free lists may hold at most; unmaps what is over.");
    m.def("pool_statistics", [] { return pool().statistics(); },
          "Bytes cached and in use, the limit, and how often a free list had a block.");
}
