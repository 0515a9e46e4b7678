# MOESAIC_UNICODE=AUTO|ON|OFF -> MOESAIC_WITH_UNICODE and the target unicode_libraries. Only tokenizers other than the
# byte-level one need it.
set(MOESAIC_UNICODE AUTO CACHE STRING "Tokenizers of words, through PCRE2 and utf8proc: AUTO (when both are found), ON, OFF")
set(MOESAIC_WITH_UNICODE OFF)
if(NOT MOESAIC_UNICODE STREQUAL "OFF")
  pkg_check_modules(PCRE2 QUIET IMPORTED_TARGET libpcre2-8>=10.40)  # 10.40: the property White_Space
  pkg_check_modules(UTF8PROC QUIET IMPORTED_TARGET libutf8proc)
  if(PCRE2_FOUND AND UTF8PROC_FOUND)
    set(MOESAIC_WITH_UNICODE ON)
    add_library(unicode_libraries INTERFACE)
    target_link_libraries(unicode_libraries INTERFACE PkgConfig::PCRE2 PkgConfig::UTF8PROC)
  elseif(MOESAIC_UNICODE STREQUAL "ON")
    message(FATAL_ERROR "MOESAIC_UNICODE=ON, but pkg-config does not find libpcre2-8 (10.40 or newer) and libutf8proc. "
                        "Install libpcre2-dev and libutf8proc-dev (scripts/install_packages.sh), or use MOESAIC_UNICODE=OFF.")
  endif()
endif()
if(MOESAIC_WITH_UNICODE)
  message(STATUS "Tokenizers: PCRE2 ${PCRE2_VERSION}, utf8proc ${UTF8PROC_VERSION}")
else()
  message(STATUS "Tokenizers: byte-level only (libpcre2-dev or libutf8proc-dev is missing, or MOESAIC_UNICODE=OFF)")
endif()
